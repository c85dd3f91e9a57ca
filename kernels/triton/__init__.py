"""The expert layer's steps as Triton kernels, for NVIDIA GPUs and Triton's interpreter."""

"""Kernels in Triton, one source for Hopper and Blackwell GPUs and for Triton's interpreter on a CPU."""

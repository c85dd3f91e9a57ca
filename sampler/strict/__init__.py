"""vLLM under a strict spec: its models, with the operators of `kernels.strict` in the place of its own."""

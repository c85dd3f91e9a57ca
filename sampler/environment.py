"""What vLLM reads from the process around it, set in this one place, before vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sampler.config import SamplerConfig

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process: weights are updated in place
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads pinned to cores would starve whoever shares them
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `sampler.routes` reads the batches of the first (CPUs have no other)
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # Sums between processes are NCCL's, which are the same on all of them.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    # FlashInfer's sampler is compiled at its first use, and draws other tokens for the same seeds.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # One small function behind log-probabilities is compiled on first use: seconds, and a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
}
_DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR"}  # what a user may override
_UNSET = ("VLLM_CPU_KVCACHE_SPACE",)  # would override `SamplerConfig.kv_cache_gib`


@contextmanager
def vllm_environment(config: SamplerConfig) -> Iterator[None]:
    """Inside, import vLLM and start an engine.

    vLLM's CPU worker replaces `torch.set_num_threads` by a function that does nothing, to protect its
    binding of threads to cores. Nothing is bound here, so the real one is put back at the end.
    """
    os.environ.update(_VARIABLES)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name in _UNSET:
        os.environ.pop(name, None)
    set_num_threads = torch.set_num_threads
    if config.threads:
        os.environ["OMP_NUM_THREADS"] = str(config.threads)  # of libraries that are not loaded yet
        set_num_threads(config.threads)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads

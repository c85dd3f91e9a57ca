"""Process-wide state that the learner needs: threads, the process group, deterministic algorithms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from learner.config import LearnerConfig
from learner.megatron_api import parallel_state


def start(config: LearnerConfig) -> torch.device:
    """Set threads, join the process group (gloo on CPU, nccl on CUDA) and Megatron's groups over it.

    With `data_parallel` ranks each of as many processes must come here, with the environment variables by which
    torchrun tells them of each other. What this process already holds is kept. Raises RuntimeError when the device is
    absent, and ValueError when a process group of another size exists.
    """
    if config.recompute:
        raise ValueError("LearnerConfig.recompute=True: this learner keeps all activations")
    for name in ("tensor_parallel", "expert_parallel", "pipeline_parallel"):
        if (value := getattr(config, name)) != 1:
            raise ValueError(
                f"LearnerConfig.{name}={value} must be 1: each process of the learner holds the whole model"
            )
    device = torch.device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"LearnerConfig.device={config.device!r}, but this process sees no CUDA device"
            )
        torch.cuda.set_device(device)
        # Without a fixed workspace cuBLAS refuses to run under deterministic algorithms.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not dist.is_initialized():
        if parallel_state.model_parallel_is_initialized():  # groups that ended with another's process group
            parallel_state.destroy_model_parallel()
        backend = "nccl" if device.type == "cuda" else "gloo"
        if config.data_parallel == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
    if dist.get_world_size() != config.data_parallel:
        raise ValueError(
            f"LearnerConfig.data_parallel={config.data_parallel}, found a process group of {dist.get_world_size()}"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    return device


@contextmanager
def deterministic() -> Iterator[None]:
    """Run only deterministic algorithms inside, and leave the process as it was."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = (
        False  # a debugging aid that costs a pass over memory
    )
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill

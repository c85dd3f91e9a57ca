"""Process-wide state that the learner needs: threads, the process group, deterministic algorithms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
import torch.distributed as dist

from learner import shim
from learner.config import LearnerConfig
from learner.layout import Layout
from learner.megatron_api import parallel_state


def start(config: LearnerConfig) -> torch.device:
    """Set threads, join the process group (gloo on CPU, nccl on CUDA) and Megatron's groups over it.

    Where processes share the model each of them must come here, with the environment variables by which torchrun tells
    them of each other. Device `cuda` is then the GPU of LOCAL_RANK. What this process already holds is kept. Raises
    RuntimeError when the device is absent, and ValueError when a process group of another size, or groups of another
    layout, exist.
    """
    device = torch.device(config.device)
    layout = Layout.of(config)
    if layout.ranks > 1:
        shim.install()
        if config.device == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if config.threads:
        torch.set_num_threads(config.threads)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"LearnerConfig.device={config.device!r}, but this process sees no CUDA device"
            )
        torch.cuda.set_device(0 if device.index is None else device.index)
        # Without a fixed workspace cuBLAS refuses to run under deterministic algorithms.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not dist.is_initialized():
        if parallel_state.model_parallel_is_initialized():  # groups that ended with another's process group
            parallel_state.destroy_model_parallel()
        backend = "nccl" if device.type == "cuda" else "gloo"
        if layout.ranks == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
    if dist.get_world_size() != layout.ranks:
        raise ValueError(
            f"{_described(layout)} needs {layout.ranks} processes, found a process group of {dist.get_world_size()}"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
    found = _found_layout()
    if found != layout:
        raise ValueError(f"{_described(layout)} differs from what this process holds: {_described(found)}")
    return device


def _found_layout() -> Layout:
    return Layout(
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )


def _described(layout: Layout) -> str:
    return ", ".join(f"{kind}_parallel={count}" for kind, count in asdict(layout).items())


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

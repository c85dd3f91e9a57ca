"""What a process says of itself: where it listens, its device, the memory that it takes. How it loads libraries."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rl.placement import HOST, HOST_VARIABLE

if TYPE_CHECKING:
    import torch


def own_host() -> str:
    """Where this process listens for those of the run's other nodes, if there are any (`rl.placement`)."""
    return os.environ.get(HOST_VARIABLE, HOST)


def device_name(device: torch.device) -> str:
    """As the driver reports a GPU; "cpu" for that."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_mib() -> float:
    """Largest resident set of this process so far, in MiB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_gpu_mib() -> float:
    """Most GPU memory that tensors of this process took at once since the last call, in MiB; 0 without a GPU."""
    import torch

    if not torch.cuda.is_initialized():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**20
    torch.cuda.reset_peak_memory_stats()
    return peak


@contextmanager
def loading() -> Iterator[None]:
    """Inside, large libraries are imported. They make hundreds of thousands of objects that stay: Python's search for
    cyclic garbage would go through them again and again, inside and later, a fifth of the time that an import takes.
    """
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        gc.enable()

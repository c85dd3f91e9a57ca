"""Megatron-core's parallel parts on a CPU.

They allocate buffers on "the current CUDA device" and wait for it. Where there is none, the modules named here get, in
the place of `torch`, a stand-in to which that device is the CPU. torch itself is not touched, and on a machine with a
GPU neither are they.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

_MODULES = (
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.utils",
)


def install() -> None:
    """Idempotent; where CUDA is available only the generators are left out."""
    # Those of dropout, on GPUs, which have to be seeded: nothing is drawn within Megatron's layers here.
    importlib.import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker().fork = _no_generator
    if torch.cuda.is_available():
        return
    stand_in = _stand_in()
    for name in _MODULES:
        module = importlib.import_module(name)
        assert module.torch is torch or isinstance(module.torch, _StandIn), name
        module.torch = stand_in


def _no_generator(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


class _StandIn(ModuleType):
    """Has the attributes that it is given, and else those of `original`."""

    def __init__(self, original: Any, own: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__["_original"] = original
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


@functools.cache
def _stand_in() -> _StandIn:
    cpu = torch.device("cpu")
    cuda = _StandIn(torch.cuda, {"current_device": lambda: cpu, "synchronize": lambda *_: None})

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = cpu
        return torch.zeros(*args, **kwargs)

    return _StandIn(torch, {"cuda": cuda, "zeros": zeros})

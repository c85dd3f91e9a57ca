"""Intermediate values of an expert layer, shown while it is computed to whoever asked to see them.

A diagnosis compares what two engines really computed, so it listens to the run itself instead of repeating it. What is
shown must not be changed. Without a listener `show` does nothing.

    FC1 input, FC2 input    `Shown`, once for each call of the quantiser; a plain tensor where the spec has none
    fc1, swiglu, fc2        the tensors of `kernels.reference.ExpertRows`, in the routing's grouped order

The Triton kernels then write codes beside what their products read, and wait for the device: a layer that is listened
to is called by Python, not replayed from a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from kernels.quantize import QuantizedTensor


@dataclass(frozen=True, eq=False)
class Shown:
    """Quantised rows of an operand.

    rows: int64, which of them is each grouped row; None when they are grouped rows, those of the next experts in turn.
    """

    quantized: QuantizedTensor
    rows: torch.Tensor | None


Listener = Callable[[str, "torch.Tensor | Shown"], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, `listener` is called with the name and value of everything that is shown in this thread."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def listened_to() -> bool:
    """Whether anybody listens in this thread."""
    return _listener.get() is not None


def show(name: str, value: torch.Tensor | Shown) -> None:
    listener = _listener.get()
    if listener is not None:
        listener(name, value)

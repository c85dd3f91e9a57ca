"""BF16 to FP32 at memory speed, alone or added to what is there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.codec import to_f32

_ELEMENTS = 4096  # a program


def widen(x: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """x bfloat16, contiguous -> float32 of its shape; with `total`, float32 and contiguous, that plus x, in place."""
    into = torch.empty(x.shape, dtype=torch.float32, device=x.device) if total is None else total
    if x.dtype != torch.bfloat16 or into.dtype != torch.float32 or x.shape != into.shape:
        found = f"{x.dtype} {tuple(x.shape)} and {into.dtype} {tuple(into.shape)}"
        raise ValueError(f"bfloat16 is widened to float32 of the same shape, got {found}")
    if not x.is_contiguous() or not into.is_contiguous():
        raise ValueError("what is widened, and what it is added to, must be contiguous")
    if x.numel():
        _widen[(triton.cdiv(x.numel(), _ELEMENTS),)](
            x, into, x.numel(), ADD=total is not None, ELEMENTS=_ELEMENTS
        )
    return into


@triton.jit
def _widen(x, into, count, ADD: tl.constexpr, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    own = to_f32(tl.load(x + at, mask=at < count, other=0.0))
    if ADD:
        own += tl.load(into + at, mask=at < count, other=0.0)
    tl.store(into + at, own, mask=at < count)

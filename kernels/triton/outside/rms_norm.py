"""RMS norm and its gradient, each in one pass over memory (Zhang and Sennrich 2019, arXiv 1910.07467).

Everything is computed in FP32 and cast once. The weight's gradient is summed in an order that depends on nothing but
the number of rows and of the device's processors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.codec import as_stored, to_bf16, to_f32
from kernels.triton.support import processors

_ELEMENTS = 4096  # at a time
_PROGRAMS = 4  # a processor, for the gradient


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x bfloat16 [R, W], weight bfloat16 [W] -> x / rms(x) * weight, bfloat16 [R, W], and 1 / rms(x), float32 [R].

    Raises ValueError for other types or shapes.
    """
    rows, width = _checked(x, weight)
    x = x.contiguous()
    normed = torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    padded, block = _block(width)
    if rows:
        _forward[(triton.cdiv(rows, block),)](
            x, weight, as_stored(normed), inverse, rows, eps, WIDTH=width, PADDED=padded, ROWS=block
        )
    return normed, inverse


def rms_norm_gradient(
    d_normed: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient bfloat16 [R, W] of the normed rows those of x, bfloat16 [R, W], and weight, bfloat16 [W];
    inverse: as `rms_norm` gave it. Raises ValueError for other types or shapes.
    """
    rows, width = _checked(x, weight)
    if d_normed.dtype != x.dtype or d_normed.shape != x.shape or inverse.shape != (rows,):
        found = f"{d_normed.dtype} {tuple(d_normed.shape)} and {tuple(inverse.shape)}"
        raise ValueError(f"the gradient must be bfloat16 {tuple(x.shape)}, inverse [{rows}], got {found}")
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not rows:
        return d_x, torch.zeros_like(weight)
    padded, block = _block(width)
    blocks = triton.cdiv(rows, block)
    programs = min(blocks, _PROGRAMS * processors(x.device))
    sums = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        d_normed.contiguous(),
        x.contiguous(),
        weight,
        inverse,
        as_stored(d_x),
        sums,
        rows,
        triton.cdiv(blocks, programs),
        WIDTH=width,
        PADDED=padded,
        ROWS=block,
    )
    return d_x, sums.sum(0).to(weight.dtype)


def _checked(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    if (
        x.dtype != torch.bfloat16
        or weight.dtype != torch.bfloat16
        or x.dim() != 2
        or weight.shape != x.shape[1:]
    ):
        found = f"{x.dtype} {tuple(x.shape)} and {weight.dtype} {tuple(weight.shape)}"
        raise ValueError(f"the norm's kernels take bfloat16 [R, W] and [W], got {found}")
    return x.shape[0], x.shape[1]


def _block(width: int) -> tuple[int, int]:
    padded = triton.next_power_of_2(width)
    return padded, max(1, _ELEMENTS // padded)


@triton.jit
def _forward(
    x, weight, normed, inverse, rows, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)[None, :]
    mask = (row < rows)[:, None] & (column < WIDTH)
    at = row.to(tl.int64)[:, None] * WIDTH + column
    own = to_f32(tl.load(x + at, mask=mask, other=0.0))
    scale = to_f32(tl.load(weight + column, mask=column < WIDTH, other=0.0))
    root = tl.rsqrt(tl.sum(own * own, axis=1) / WIDTH + eps)
    tl.store(normed + at, to_bf16(own * root[:, None] * scale), mask=mask)
    tl.store(inverse + row, root, mask=row < rows)


@triton.jit
def _backward(
    d_normed,
    x,
    weight,
    inverse,
    d_x,
    sums,
    rows,
    blocks,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Blocks of rows one after another; what each adds to the weight's gradient is summed up on the way."""
    column = tl.arange(0, PADDED)[None, :]
    scale = to_f32(tl.load(weight + column, mask=column < WIDTH, other=0.0))
    total = tl.zeros((ROWS, PADDED), tl.float32)
    for block in range(blocks):
        row = (tl.program_id(0) * blocks + block) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < WIDTH)
        at = row.to(tl.int64)[:, None] * WIDTH + column
        root = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        own = to_f32(tl.load(x + at, mask=mask, other=0.0)) * root
        incoming = to_f32(tl.load(d_normed + at, mask=mask, other=0.0))
        total += incoming * own
        scaled = incoming * scale
        mean = tl.sum(scaled * own, axis=1)[:, None] / WIDTH
        tl.store(d_x + at, to_bf16((scaled - own * mean) * root), mask=mask)
    at = tl.program_id(0) * WIDTH + tl.arange(0, PADDED)
    tl.store(sums + at, tl.sum(total, axis=0), mask=tl.arange(0, PADDED) < WIDTH)

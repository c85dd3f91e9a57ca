"""Rotary positions of packed tokens in one pass over memory, with the roundings of the unfused formula in BF16.

In type T: T(T(x * cos) + T(rotate_half(x) * sin)), rotate_half(x) = (-x2, x1) of the halves of x, as Megatron-core and
transformers compose it (Su et al. 2021, arXiv 2104.09864).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.codec import as_stored, bf16_low, round_bf16, to_bf16, to_f32

_VECTORS = 32  # a program


def rotate(
    x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, back: bool = False
) -> torch.Tensor:
    """x bfloat16 [T, heads, D]; cosines, sines bfloat16 [T, D/2] -> bfloat16 [T, heads, D], contiguous.

    back: the gradient of x, from that of the result, as autograd makes it of the unfused formula. Heads of x must lie
    one after another; tokens may be further apart. Raises ValueError for other types and shapes, and for a D/2 that is
    no power of two.
    """
    tokens, heads, width = x.shape
    half = width // 2
    if {x.dtype, cosines.dtype, sines.dtype} != {torch.bfloat16}:
        raise ValueError(f"rotary kernels take bfloat16, got {x.dtype}, {cosines.dtype} and {sines.dtype}")
    if half * 2 != width or half & (half - 1):
        raise ValueError(f"rotary kernels need a head whose half is a power of two, got {width}")
    for name, table in (("cosines", cosines), ("sines", sines)):
        if table.shape != (tokens, half):
            raise ValueError(f"{name} must be [{tokens}, {half}], got {tuple(table.shape)}")
    if x.stride(2) != 1 or x.stride(1) != width:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotate[(triton.cdiv(tokens * heads, _VECTORS),)](
            x,
            cosines.contiguous(),
            sines.contiguous(),
            as_stored(out),
            tokens * heads,
            x.stride(0),
            HEADS=heads,
            HALF=half,
            VECTORS=_VECTORS,
            BACK=back,
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _rotate(
    x,
    cosines,
    sines,
    out,
    count,
    stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    VECTORS: tl.constexpr,
    BACK: tl.constexpr,
):
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    token, head = (vector // HEADS).to(tl.int64), vector % HEADS
    column = tl.arange(0, HALF)[None, :]
    mask = (vector < count)[:, None]
    source = x + (token * stride + head * (2 * HALF))[:, None] + column
    first = to_f32(tl.load(source, mask=mask, other=0.0))
    second = to_f32(tl.load(source + HALF, mask=mask, other=0.0))
    cosine = to_f32(tl.load(cosines + token[:, None] * HALF + column, mask=mask, other=0.0))
    sine = to_f32(tl.load(sines + token[:, None] * HALF + column, mask=mask, other=0.0))
    if BACK:
        sine = -sine
    target = out + vector.to(tl.int64)[:, None] * (2 * HALF) + column
    tl.store(target, to_bf16(_rounded(first * cosine) - _rounded(second * sine)), mask=mask)
    tl.store(target + HALF, to_bf16(_rounded(second * cosine) + _rounded(first * sine)), mask=mask)


@triton.jit
def _rounded(x):
    """float32 -> the nearest BF16 number, as float32."""
    return bf16_low(round_bf16(x))

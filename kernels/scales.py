"""The scale formulas of a quantiser, one function for each member of `quantizer_spec`.

Notation as there. Every operation is one FP32 operation on tensors: a Python number as divisor would become a
product with its reciprocal on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from kernels import codec_e4m3, codec_e8m0
from kernels.formats import ELEMENTS
from kernels.quantizer_spec import (
    BlockScale,
    BlockScaleFloor,
    BlockScaleFormat,
    ElementQuotient,
    OuterScale,
    OuterStored,
    QuantizerSpec,
    ZeroBlock,
    ZeroGroup,
)

FP32_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max
SMALLEST_NORMAL = math.ldexp(1.0, -126)
ZERO_GROUP_BELOW = math.ldexp(1.0, -100)


@dataclass(frozen=True)
class OuterScales:
    """float32, one value a group: the largest magnitude A, the encode scale S, the decode scale g."""

    amax: torch.Tensor
    encode: torch.Tensor
    decode: torch.Tensor

    def stored(self, spec: QuantizerSpec) -> torch.Tensor:
        return {OuterStored.AMAX: self.amax, OuterStored.ENCODE: self.encode}.get(
            spec.outer_stored, self.decode
        )


@dataclass(frozen=True)
class Step:
    """How an element becomes what is rounded: divided by or multiplied with `factor`.

    factor: float32, [R, blocks] or what broadcasts to it
    """

    factor: torch.Tensor
    divide: bool

    def rows(self, count: int) -> Step:
        """The same with a factor [count, blocks]."""
        return replace(self, factor=self.factor.expand(count, -1))

    def zero_where(self, blocks: torch.Tensor) -> Step:
        """The same with a factor of 0 for some blocks, bool [R, blocks]."""
        return replace(self, factor=self.factor.masked_fill(blocks, 0.0))

    def apply(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        """[R, K] -> float32 [the rows' number, blocks, K/blocks]."""
        factor = self.factor[rows].unsqueeze(-1)
        blocks = x[rows].float().view(*factor.shape[:2], -1)
        if self.divide:
            return blocks / factor
        return blocks * factor


def outer_divisor(spec: QuantizerSpec) -> float:
    """M: the largest element times the largest block scale that the outer scale aims at."""
    return ELEMENTS[spec.element].max * (spec.block_scale_max or 1)


def outer_scales(amax: torch.Tensor, spec: QuantizerSpec) -> OuterScales:
    """float32 A >= 0 of any shape -> the group's scales."""
    if spec.zero_group is ZeroGroup.AT_LEAST_1E_MINUS_8:
        amax = amax.clamp(min=1e-8)
    largest = _constant(amax, outer_divisor(spec))
    if spec.outer_scale in (OuterScale.ENCODE_DIVIDED, OuterScale.ENCODE_MULTIPLIED):
        encode = largest / amax if spec.outer_scale is OuterScale.ENCODE_DIVIDED else (1 / amax) * largest
        if spec.zero_group is ZeroGroup.UNIT_IF_OVERFLOW:
            encode = encode.masked_fill(~encode.isfinite(), 1.0)
        encode = encode.clamp(max=FP32_MAX)
        decode = 1 / encode
    elif spec.outer_scale is OuterScale.DECODE_MULTIPLIED:
        decode = _flush(amax * (1 / largest))
        encode = approximate_reciprocal(decode)
    else:
        decode = amax / largest
        encode = (1 / decode).clamp(max=FP32_MAX)

    match spec.zero_group:
        case ZeroGroup.UNIT_BELOW_2POW_MINUS_100:
            zero, encode_of_zero, decode_of_zero = amax < ZERO_GROUP_BELOW, 1.0, 1.0
        case ZeroGroup.UNIT_ENCODE | ZeroGroup.UNIT_DECODE:
            zero, encode_of_zero, decode_of_zero = (amax == 0) | (encode == 0), 1.0, 1.0
        case ZeroGroup.LARGEST_ENCODE:
            zero, encode_of_zero, decode_of_zero = encode == 0, 1.0, 1.0  # an infinite A
        case ZeroGroup.ZERO:
            zero, encode_of_zero, decode_of_zero = decode == 0, 0.0, 0.0
        case _:
            return OuterScales(amax, encode, decode)
    encode = encode.masked_fill(zero, encode_of_zero)
    return OuterScales(amax, encode, decode.masked_fill(zero, decode_of_zero))


def block_scales(
    amax: torch.Tensor, outer: OuterScales, spec: QuantizerSpec, expansion: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 a >= 0 [R, blocks], with outer scales that broadcast to it -> uint8 bytes and their float32 values.

    expansion: factor on a scale before it is rounded (1.5 for the candidate of 4over6 whose largest code is 4).
    """
    largest = ELEMENTS[spec.element].max
    if spec.block_scale_format is BlockScaleFormat.E8M0:
        stored = codec_e8m0.encode(_power_of_two(amax, spec, largest))
        return stored, codec_e8m0.decode(stored)
    scale = _BLOCK_SCALE[spec.block_scale](amax, outer, _constant(amax, largest))
    zero = scale == 0
    if expansion != 1.0:
        scale = scale * expansion
    if spec.block_scale_floor is not BlockScaleFloor.NONE:
        scale = scale.clamp(min=_FLOOR[spec.block_scale_floor])
    stored = codec_e4m3.encode(scale)
    if spec.zero_block is ZeroBlock.UNIT_IF_ZERO:
        stored = stored.masked_fill(zero, _ONE)
    elif spec.zero_block is ZeroBlock.EIGHTH_IF_BYTE_ZERO:
        stored = stored.masked_fill(stored == 0, _EIGHTH)
    return stored, codec_e4m3.decode(stored)


def element_step(scale: torch.Tensor | None, outer: OuterScales, spec: QuantizerSpec) -> Step:
    """The block scales' values (None without blocks) and outer scales -> what is done to every element."""
    g, encode = outer.decode, outer.encode
    if scale is None:
        return Step(g, divide=True)
    match spec.quotient:
        case ElementQuotient.X_DIV_SG:
            return Step(scale * g, divide=True)
        case ElementQuotient.X_DIV_S_OVER_S:
            return Step(scale / encode, divide=True)
        case ElementQuotient.X_MUL_INV_S_INV_S:
            return Step((1 / (scale * (1 / encode))).clamp(max=FP32_MAX), divide=False)
        case ElementQuotient.X_MUL_RCP_S_RCP_S:
            return Step(approximate_reciprocal(scale * approximate_reciprocal(encode)), divide=False)
        case ElementQuotient.X_MUL_S_OVER_S:
            return Step(encode / scale, divide=False)
        case ElementQuotient.X_MUL_INV_G_OVER_S:
            return Step((1 / g) / scale, divide=False)
        case ElementQuotient.X_MUL_BF16_S_OVER_S:
            factor = (encode / scale).clamp(max=BF16_MAX).to(torch.bfloat16)
            return Step(factor.float(), divide=False)
        case _:
            return Step(scale, divide=True)


def approximate_reciprocal(x: torch.Tensor) -> torch.Tensor:
    """`rcp.approx.ftz.f32`, taken as correctly rounded: subnormal inputs and results count as zero.

    The hardware is within one unit in the last place of that (PTX ISA, `rcp`).
    """
    return _flush(1 / _flush(x))


def _flush(x: torch.Tensor) -> torch.Tensor:
    """Subnormal numbers become zero."""
    return torch.where(x.abs() < SMALLEST_NORMAL, torch.zeros_like(x), x)


def unit_outer(like: torch.Tensor) -> OuterScales:
    """Outer scales of 1, for quantisers that have none."""
    one = _constant(like, 1.0)
    return OuterScales(one, one, one)


def _constant(like: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full((1, 1), value, dtype=torch.float32, device=like.device)


def _power_of_two(amax: torch.Tensor, spec: QuantizerSpec, largest: float) -> torch.Tensor:
    """Exponents of E8M0 block scales; those of zero blocks are the smallest."""
    if spec.block_scale is BlockScale.POWER_FLOOR:
        exponent = torch.frexp(amax).exponent - math.frexp(largest)[1]
    else:
        mantissa, exponent = torch.frexp(amax / _constant(amax, largest))
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return exponent.masked_fill(amax == 0, -codec_e8m0.BIAS)


_BLOCK_SCALE: Mapping[BlockScale, Callable[[torch.Tensor, OuterScales, torch.Tensor], torch.Tensor]] = {
    BlockScale.A_DIV_EG: lambda a, outer, e: a / (outer.decode * e),
    BlockScale.A_DIV_E_DIV_G: lambda a, outer, e: (a / e) / outer.decode,
    BlockScale.A_DIV_E_MUL_S: lambda a, outer, e: (a / e) * outer.encode,
    BlockScale.A_MUL_S_INV_E: lambda a, outer, e: a * (outer.encode * (1 / e)),
    BlockScale.A_INV_E_MUL_S: lambda a, outer, e: (a * (1 / e)) * outer.encode,
    BlockScale.A_RCP_E_MUL_S: lambda a, outer, e: (a * approximate_reciprocal(e)) * outer.encode,
}
_FLOOR = {BlockScaleFloor.SMALLEST_NORMAL: math.ldexp(1.0, -6), BlockScaleFloor.SMALLEST: math.ldexp(1.0, -9)}
_ONE, _EIGHTH = 0x38, 0x20  # 1.0 and 1/8 in E4M3

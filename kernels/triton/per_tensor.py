"""Rows quantised with one outer scale for all of an expert's, as `te_per_tensor` says, each step a pass of its own.

The scale must be known before the first element is coded, so that a pass over everything finds the largest magnitude
first: what this domain costs. Blocks of 16 lie along a row (the operands of the forward, and of the gradient's products
that sum over features) or along a column (those that sum over tokens), rotated there if the spec says so. What is
written are decoded elements, code times block scale, exact in float16: the operand of an emulated product.

    S = 2688 / A                    1 where A = 0 or infinite, at most the largest FP32 number
    s = E4M3(a * (S * (1 / 6)))
    c = E2M1(x * (1 / (s * (1 / S))))       the factor at most the largest FP32 number; NaN counts as 6, and not in A
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.quantize import QuantizedTensor
from kernels.transform import SIZE, hadamard_matrix
from kernels.triton.codec import COMPILED, INFINITY_BITS, e4m3_encode, e4m3_to_f32, round_bf16, to_f32
from kernels.triton.grouping import ExpertGroups
from kernels.triton.operand import BLOCK

_LARGEST = tl.constexpr(3.4028234663852886e38)  # FP32
_ALONG_ROW, _ALONG_COLUMN = (32, 128), (64, 64)  # rows and columns of a tile


class Decoded(NamedTuple):
    """Elements without their outer scales."""

    elements: torch.Tensor  # float16, code times block scale
    amax: torch.Tensor  # float32 [E], A

    def decode_scale(self) -> torch.Tensor:
        """float32 [E], g = 1 / S."""
        largest = torch.full_like(self.amax, torch.finfo(torch.float32).max)
        encode = torch.minimum(torch.full_like(self.amax, 2688.0) / self.amax, largest)
        zero = (self.amax == 0) | (encode == 0)
        return torch.where(zero, torch.ones_like(encode), torch.ones_like(encode) / encode)


def quantize_rows(x: torch.Tensor, groups: ExpertGroups, *, seed: int | None = None) -> Decoded:
    """bfloat16 [R, K] in grouped order, blocks along K -> elements [R, K]. seed: of stochastic rounding, if any."""
    return _grouped(x, groups, seed, along_column=False, rotate=False)


def quantized_rows(x: torch.Tensor, groups: ExpertGroups) -> list[QuantizedTensor]:
    """As `quantize_rows`, the rows of each expert that has any, as they would be stored. Waits for the device."""
    amax = torch.zeros(groups.counts.shape[0], dtype=torch.int32, device=x.device)
    codes = torch.empty(len(x), x.shape[1] // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), x.shape[1] // BLOCK, dtype=torch.uint8, device=x.device)
    for measure in (True, False):
        _launch(x, amax, 0, measure=measure, groups=groups, codes=codes, scales=scales)
    own = [
        (expert, slice(start, start + count))
        for expert, (start, count) in enumerate(
            zip(groups.starts.tolist(), groups.counts.tolist(), strict=False)
        )
        if count
    ]
    outer = amax.view(torch.float32).view(-1, 1, 1)
    return [QuantizedTensor(codes[rows], scales[rows], outer[expert]) for expert, rows in own]


def quantize_columns(
    x: torch.Tensor, groups: ExpertGroups, *, rotate: bool, seed: int | None = None
) -> Decoded:
    """bfloat16 [R, K] in grouped order with padding rows of zeros, blocks along the rows of an expert -> elements
    [R, K]. rotate: each block by the Hadamard transform first, rounded to bfloat16.
    """
    return _grouped(x, groups, seed, along_column=True, rotate=rotate)


def quantize_weight(weight: torch.Tensor) -> QuantizedTensor:
    """bfloat16 [E, N, K], blocks along K -> as `kernels.quantize.quantize_weight`."""
    experts, features, width = weight.shape
    codes = torch.empty(experts, features, width // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(experts, features, width // BLOCK, dtype=torch.uint8, device=weight.device)
    amax = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    for measure in (True, False):
        _launch(weight.flatten(0, 1), amax, features, measure=measure, codes=codes, scales=scales)
    return QuantizedTensor(codes, scales, amax.view(torch.float32)[:, None])


def transposed_weight(weight: torch.Tensor) -> Decoded:
    """bfloat16 [E, N, K], blocks along N -> elements [E, K, N]: the weight of the gradient's product over N."""
    experts, features, width = weight.shape
    elements = torch.empty(experts, width, features, dtype=torch.float16, device=weight.device)
    amax = torch.zeros(experts, dtype=torch.int32, device=weight.device)
    for measure in (True, False):
        rows = weight.flatten(0, 1)
        _launch(rows, amax, features, measure=measure, elements=elements, along_column=True)
    return Decoded(elements, amax.view(torch.float32))


def _grouped(
    x: torch.Tensor, groups: ExpertGroups, seed: int | None, *, along_column: bool, rotate: bool
) -> Decoded:
    amax = torch.zeros(groups.counts.shape[0], dtype=torch.int32, device=x.device)
    elements = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    launch = partial(_launch, x, amax, 0, groups=groups, along_column=along_column, rotate=rotate)
    for measure in (True, False):
        launch(measure=measure, elements=elements, seed=seed)
    return Decoded(elements, amax.view(torch.float32))


def _launch(
    x: torch.Tensor,
    amax: torch.Tensor,
    features: int,
    *,
    measure: bool,
    groups: ExpertGroups | None = None,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    elements: torch.Tensor | None = None,
    along_column: bool = False,
    rotate: bool = False,
    seed: int | None = None,
) -> None:
    """x [R, K] of `groups`, or [E * features, K] of weights, whose elements are then written transposed."""
    if not x.numel():
        return
    rows, columns = _ALONG_COLUMN if along_column else _ALONG_ROW
    if not COMPILED.value:
        rows, columns = 128, 128  # the interpreter's time goes by tiles
    tiles = triton.cdiv(features, rows) * len(amax) if groups is None else triton.cdiv(len(x), rows)
    _quantize_tile[(tiles, triton.cdiv(x.shape[1], columns))](
        x.contiguous(),
        amax if groups is None else groups.tile_expert,
        amax,
        amax if codes is None else codes,
        amax if scales is None else scales,
        amax if elements is None else elements,
        _rotation(x.device, rows) if rotate else amax,
        features,
        x.shape[1],
        seed or 0,
        ROWS=rows,
        COLUMNS=columns,
        ALIGN=0 if groups is None else groups.align,
        ALONG_COLUMN=along_column,
        ROTATE=rotate,
        MEASURE=measure,
        STOCHASTIC=seed is not None,
        PACKED=codes is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )


@lru_cache(maxsize=64)
def _rotation(device: torch.device, rows: int) -> torch.Tensor:
    """float32 [rows, rows], whose product with a tile rotates every 16 of its rows."""
    own = hadamard_matrix().T.contiguous()
    return torch.block_diag(*[own] * (rows // SIZE)).contiguous().to(device)


@triton.jit(do_not_specialize=["seed"])
def _quantize_tile(
    x,
    tile_expert,
    amax,
    codes,
    scales,
    elements,
    rotation,
    features,
    width,
    seed,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    ALONG_COLUMN: tl.constexpr,
    ROTATE: tl.constexpr,
    MEASURE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PACKED: tl.constexpr,
):
    """A tile of one expert's rows. MEASURE: only raises amax[e], the FP32 bits of A. ALIGN = 0: rows are features."""
    if ALIGN > 0:
        expert = tl.load(tile_expert + tl.program_id(0) * ROWS // ALIGN)
        own = tl.arange(0, ROWS)
        first = tl.program_id(0).to(tl.int64) * ROWS
        limit = ROWS
    else:
        tiles = (features + ROWS - 1) // ROWS
        expert = tl.program_id(0) // tiles
        own = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
        first = expert.to(tl.int64) * features
        limit = features
    if expert >= 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        at = (first + own)[:, None] * width + column[None, :]
        mask = (own < limit)[:, None] & (column < width)[None, :]
        value = to_f32(tl.load(x + at, mask=mask, other=0.0))
        if ROTATE:
            index = tl.arange(0, ROWS)
            matrix = tl.load(rotation + index[:, None] * ROWS + index[None, :])
            if COMPILED:
                rotated = tl.dot(matrix.to(tl.bfloat16), value.to(tl.bfloat16))
            else:
                rotated = tl.dot(matrix, value)
            value = (round_bf16(rotated) << 16).to(tl.float32, bitcast=True)
        magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        magnitude = tl.where(magnitude > INFINITY_BITS, 0, magnitude)
        if MEASURE:
            tl.atomic_max(amax + expert, tl.max(tl.reshape(magnitude, (ROWS * COLUMNS,)), axis=0))
        else:
            if ALONG_COLUMN:
                largest = tl.max(tl.reshape(magnitude, (ROWS // 16, 16, COLUMNS)), axis=1)
            else:
                largest = tl.max(tl.reshape(magnitude, (ROWS, COLUMNS // 16, 16)), axis=2)
            encode = _encode_scale(tl.load(amax + expert))
            scale = e4m3_encode(largest.to(tl.float32, bitcast=True) * (encode * 0.16666667163372040))
            one = tl.full(scale.shape, 1.0, tl.float32)
            block = e4m3_to_f32(scale)
            step = block * tl.div_rn(one, tl.broadcast_to(encode, scale.shape))
            factor = tl.div_rn(one, tl.where(step == 0.0, one, step))
            factor = tl.where((step == 0.0) | (factor > _LARGEST), _LARGEST, factor)
            if ALONG_COLUMN:
                factor = _widened(factor, ROWS // 16, 1, ROWS, COLUMNS)
                block = _widened(block, ROWS // 16, 1, ROWS, COLUMNS)
            else:
                factor = _widened(factor, ROWS, COLUMNS // 16, ROWS, COLUMNS)
                block = _widened(block, ROWS, COLUMNS // 16, ROWS, COLUMNS)
            quotient = tl.where(value != value, 6.0, value * factor)
            noise = tl.zeros((ROWS, COLUMNS), tl.float32)
            if STOCHASTIC:
                noise = tl.rand(seed, at.to(tl.int32))
            index = _index(tl.abs(quotient), noise, STOCHASTIC)
            negative = quotient.to(tl.int32, bitcast=True) < 0
            if PACKED:
                code = index | tl.where(negative, 8, 0)
                low, high = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
                pair = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
                to = (first + own)[:, None] * (width // 2) + pair[None, :]
                inside = (own < limit)[:, None] & (pair < width // 2)[None, :]
                tl.store(codes + to, (low | (high << 4)).to(tl.uint8), mask=inside)
                number = tl.program_id(1) * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)
                to = (first + own)[:, None] * (width // 16) + number[None, :]
                inside = (own < limit)[:, None] & (number < width // 16)[None, :]
                tl.store(scales + to, scale.to(tl.uint8), mask=inside)
            else:
                decoded = _magnitude(index) * block
                decoded = tl.where(negative, -decoded, decoded).to(tl.float16)
                if ALIGN == 0:
                    at = (first * width + own)[:, None] + column[None, :].to(tl.int64) * features
                tl.store(elements + at, decoded, mask=mask)


@triton.jit
def _encode_scale(bits):
    """FP32 bits (int32) of A -> S."""
    largest = bits.to(tl.float32, bitcast=True)
    zero = largest == 0.0
    encode = tl.div_rn(2688.0, tl.where(zero, 1.0, largest))
    encode = tl.where(encode > _LARGEST, _LARGEST, encode)
    return tl.where(zero | (encode == 0.0), 1.0, encode)


@triton.jit
def _widened(blocks, FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One number a block -> one an element: [ROWS/16, COLUMNS] along columns (SECOND = 1), else [ROWS, COLUMNS/16]."""
    if SECOND == 1:
        spread = tl.broadcast_to(blocks[:, None, :], (FIRST, 16, COLUMNS))
    else:
        spread = tl.broadcast_to(blocks[:, :, None], (FIRST, SECOND, 16))
    return tl.reshape(spread, (ROWS, COLUMNS))


@triton.jit
def _index(magnitude, noise, STOCHASTIC: tl.constexpr):
    """float32 >= 0 -> index of an E2M1 magnitude (int32): nearest, ties to even; or rounded down after noise of up to
    one unit in the last place was added. Saturates.
    """
    if STOCHASTIC:
        units = tl.where(
            magnitude < 2.0, magnitude * 2.0, tl.where(magnitude < 4.0, magnitude, magnitude * 0.5)
        )
        units = tl.where(magnitude < 6.0, units, 3.0)
        start = tl.where(magnitude < 2.0, 0, tl.where(magnitude < 4.0, 2, 4))
        index = tl.minimum(start + tl.floor(units + noise).to(tl.int32), 7)
    else:
        index = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
        index += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
        index += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
        index += (magnitude > 5.0).to(tl.int32)
    return index


@triton.jit
def _magnitude(index):
    """The E2M1 magnitude with this index: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    own = index.to(tl.float32)
    return tl.where(index < 4, own * 0.5, tl.where(index < 6, own - 2.0, own * 2.0 - 8.0))

"""The quantisers of `kernels.quantizer_spec` a second time: what every back end is compared with.

Slow and plain, in numpy and float64, with FP32 roundings spelled out. The formulas are not written here: they are
read from the spec (`kernels.conformance.formula`). Nothing is shared with `kernels.scales` and `kernels.quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kernels.conformance.formula import FP32_MAX, SMALLEST_NORMAL, Names, assignments, evaluate, fp32
from kernels.quantizer_spec import (
    Block,
    BlockScaleFloor,
    BlockScaleFormat,
    CodeLayout,
    Element,
    ElementQuotient,
    NegativeZero,
    NonFinite,
    OuterScale,
    OuterStored,
    QuantizerSpec,
    Rounding,
    ScaleDomain,
    ScaleLayout,
    Selector,
    Transform,
    ZeroBlock,
    ZeroGroup,
)


class Undetermined(Exception):
    """What the spec leaves open to the last bit, so that there is no one expected value."""


def format_values(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> np.ndarray:
    """The first `count` non-negative values of a small floating-point format, by bit pattern."""
    exponent, mantissa = np.divmod(np.arange(count), 2**mantissa_bits)
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)
    assert count <= 2 ** (exponent_bits + mantissa_bits)
    return np.ldexp(fraction, np.maximum(exponent, 1) - bias)


VALUES = {
    Element.E2M1: format_values(2, 1, 1, 8),
    Element.E2M3: format_values(2, 3, 1, 32),
    Element.E3M2: format_values(3, 2, 3, 32),
    Element.E4M3: format_values(4, 3, 7, 127),  # pattern 0x7F is NaN
}
SIGN = {Element.E2M1: 8, Element.E2M3: 32, Element.E3M2: 32, Element.E4M3: 128}
E4M3 = VALUES[Element.E4M3]
SCALE_NAN = 0x7F
BLOCK_SHAPE = {Block.ROW_16: (1, 16), Block.ROW_32: (1, 32), Block.TILE_16: (16, 16)}
# Transformer Engine clamps these; the others become infinite.
SATURATING_FACTORS = (ElementQuotient.X_MUL_INV_S_INV_S, ElementQuotient.X_MUL_BF16_S_OVER_S)
SHARED_DOMAINS = (ScaleDomain.TENSOR, ScaleDomain.EXPERT, ScaleDomain.EXPERT_HALF)


def nearest_even(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Patterns of the entries of `values` nearest to x >= 0: ties to the even pattern, saturating at the last."""
    upper = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    below, above = x - values[upper - 1], values[upper] - x
    down = (below < above) | ((below == above) & (upper % 2 == 1))
    return np.where(down, upper - 1, upper).astype(np.uint8)


@dataclass(frozen=True)
class Expected:
    """The quantised [R, K].

    codes: uint8 [R, K], one per element; block_scales: uint8 [R, K/b] or [ceil(R/16), K/16], None without blocks
    amax, encode, decode: float64 [R, 1] or [1, 1], the A, S and g of every outer group; None without
    values: float64 [R, K], code times block scale
    undefined: bool [R, K], elements whose code means nothing: NaN that `propagate` does not hide
    other: the result of the other candidate of 4over6, and a bool like block_scales: where the spec's errors are
        too close to tell, so that either is right
    """

    codes: np.ndarray
    block_scales: np.ndarray | None
    amax: np.ndarray | None
    encode: np.ndarray | None
    decode: np.ndarray | None
    values: np.ndarray
    undefined: np.ndarray
    other: tuple[Expected, np.ndarray] | None = None

    def stored_outer(self, spec: QuantizerSpec) -> np.ndarray | None:
        """The outer quantity that travels, float64."""
        names = {
            OuterStored.AMAX: self.amax,
            OuterStored.ENCODE: self.encode,
            OuterStored.DECODE: self.decode,
        }
        return names.get(spec.outer_stored)

    def stored_codes(self, spec: QuantizerSpec) -> np.ndarray:
        """uint8 [R, K/2] or [R, K] as `code_layout` orders them."""
        if spec.code_layout is CodeLayout.BYTE:
            return self.codes
        return self.codes[:, 0::2] + 16 * self.codes[:, 1::2]


class _Candidate(NamedTuple):
    codes: np.ndarray
    undefined: np.ndarray
    scale_bytes: np.ndarray
    error: np.ndarray


def quantize(x: np.ndarray, spec: QuantizerSpec) -> Expected:
    """float64 [R, K] that holds BF16 or FP32 values -> what `spec` makes of it; one outer group, or one per row.

    Values that are not finite are taken as `non_finite` says (`refuse` as `saturate`). Raises Undetermined for a spec
    whose bytes are not a function of x alone.
    """
    if spec.rounding is not Rounding.NEAREST_EVEN:
        raise Undetermined(f"rounding={spec.rounding} has no one result")
    if spec.transform is not Transform.NONE:
        raise Undetermined(f"transform={spec.transform}: the order of its sums is open")
    magnitude = np.abs(x)
    if spec.non_finite is not NonFinite.PROPAGATE:
        magnitude = np.where(np.isnan(x), 0, magnitude)
    scales = _outer_scales(magnitude, spec)
    if spec.block is Block.NONE:
        codes, undefined = _codes(x, spec, {**scales, "x": x})
        values = decode_codes(codes, spec)
        return Expected(codes, None, scales["A"], scales["S"], scales["g"], values, undefined)
    six = _candidate(x, magnitude, spec, scales, 1.0)
    if spec.selector is Selector.LARGEST:
        return _expected(six, scales, spec)
    four = _candidate(x, magnitude, spec, scales, 1.5)
    return _select(six, four, scales, spec)


def decode_codes(codes: np.ndarray, spec: QuantizerSpec) -> np.ndarray:
    values = VALUES[spec.element]
    table = np.full(2 * SIGN[spec.element], np.nan)
    table[: len(values)] = values
    table[SIGN[spec.element] : SIGN[spec.element] + len(values)] = -values
    return table[codes]


def decode_scales(scale_bytes: np.ndarray, spec: QuantizerSpec) -> np.ndarray:
    """The float64 values of block scale bytes."""
    if spec.block_scale_format is BlockScaleFormat.E8M0:
        return np.ldexp(1.0, scale_bytes.astype(int) - 127)
    return np.append(E4M3, np.nan)[scale_bytes & 0x7F]


def per_element(per_block: np.ndarray, spec: QuantizerSpec, shape: tuple[int, ...]) -> np.ndarray:
    """[blocks down, blocks along K] -> [R, K]."""
    rows, width = BLOCK_SHAPE[spec.block]
    return per_block.repeat(rows, 0)[: shape[0]].repeat(width, 1)


def stored_scales(expected: np.ndarray, spec: QuantizerSpec, rows: int) -> np.ndarray:
    """Block scale bytes in the spec's memory order, position by position.

    Row m, block k stand at byte (m//128 * ceil(C/4) + k//4) * 512 + m%32 * 16 + m//32%4 * 4 + k%4 of a tensor of C
    blocks along K, padded with zeros (cuBLAS, "1D Block Scaling Factors Layout").
    """
    if spec.scale_layout is not ScaleLayout.SWIZZLED_128X4:
        return expected
    columns = expected.shape[1]
    tiles = -(-columns // 4)
    flat = np.zeros(-(-rows // 128) * tiles * 512, np.uint8)
    for m in range(rows):
        for k in range(columns):
            tile = m // 128 * tiles + k // 4
            place = tile * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4
            flat[place] = expected[m // BLOCK_SHAPE[spec.block][0], k]
    return flat


def _outer_scales(magnitude: np.ndarray, spec: QuantizerSpec) -> dict[str, Any]:
    """A, S and g, [R, 1] or [1, 1], or None without outer scales; and the constants E, M and max."""
    largest = VALUES[spec.element][-1]
    constants = {"E": largest, "M": largest * (spec.block_scale_max or 1), "max": FP32_MAX}
    if spec.outer_domain is ScaleDomain.NONE:
        return {**constants, "A": None, "S": None, "g": None}
    amax = magnitude.max(1, keepdims=True, initial=0)
    if spec.outer_domain in SHARED_DOMAINS:
        amax = amax.max(0, keepdims=True, initial=0)
    condition, _, rule = str(spec.zero_group).partition(":")
    if condition.startswith("A>="):
        amax = np.maximum(amax, evaluate(condition.removeprefix("A>="), {}))
    names = {**constants, "A": amax}
    found = names | _outer_formula(spec, names, FP32_MAX)
    if not rule:
        return found
    given = assignments(rule, names)
    for name, other in (("S", "g"), ("g", "S")):
        if name not in given:
            given[name] = np.zeros(()) if condition == f"{name}=0" else evaluate(f"1/{other}", given)
    unlimited = names | _outer_formula(spec, names, np.inf)
    applies = _holds(condition, unlimited)
    if spec.zero_group is ZeroGroup.UNIT_IF_OVERFLOW:
        applies |= np.isnan(unlimited["S"])
    found |= {key: np.where(applies, given[key], found[key]) for key in ("S", "g")}
    if spec.zero_group in (ZeroGroup.UNIT_ENCODE, ZeroGroup.UNIT_DECODE, ZeroGroup.LARGEST_ENCODE):
        infinite = found["S"] == 0
        found |= {key: np.where(infinite, 1.0, found[key]) for key in ("S", "g")}
    return found


def _outer_formula(spec: QuantizerSpec, names: Names, largest: float) -> dict[str, np.ndarray]:
    if spec.outer_scale is not OuterScale.DECODE_MULTIPLIED:
        return assignments(str(spec.outer_scale), names, largest)
    first, second = str(spec.outer_scale).split(",")
    g = assignments(first, names)["g"]
    flushed = {"g": np.where(np.abs(g) < SMALLEST_NORMAL, 0.0, g)}
    return flushed | assignments(second, flushed)


def _holds(condition: str, names: Names) -> np.ndarray:
    """`A<2^-100`, `s=0`, `S=inf`: whether it is so, element by element."""
    for sign, compare in (("<", np.less), ("=", np.equal)):
        name, found, limit = condition.partition(sign)
        if found:
            return compare(names[name], np.inf if limit == "inf" else evaluate(limit, {}))
    raise ValueError(f"condition {condition!r} is not understood")


def _candidate(
    x: np.ndarray, magnitude: np.ndarray, spec: QuantizerSpec, scales: dict[str, Any], expansion: float
) -> _Candidate:
    """expansion: factor on the block scale before rounding, 1.5 for the candidate of 4over6 that ends at 4."""
    rows, width = BLOCK_SHAPE[spec.block]
    padded = np.pad(magnitude, ((0, -len(x) % rows), (0, 0)))
    shape = (len(padded) // rows, rows, x.shape[1] // width, width)
    amax = padded.reshape(shape).max((1, 3))
    names = {**scales, "a": amax}
    raw = fp32(evaluate(str(spec.block_scale), names) * expansion)
    scale_bytes = _round_scale(raw, spec)
    s = decode_scales(scale_bytes, spec)
    whole = {**scales, "x": x, "a": per_element(amax, spec, x.shape), "s": per_element(s, spec, x.shape)}
    codes, undefined = _codes(x, spec, whole)
    error = np.zeros_like(amax)
    if spec.selector is not Selector.LARGEST:
        difference = evaluate("((q*s)*A)/M-x", whole | {"q": decode_codes(codes, spec)})
        error = (
            np.abs(difference)
            if spec.selector is Selector.FOUR_OVER_SIX_MAE
            else evaluate("d*d", {"d": difference})
        )
        error = np.pad(error, ((0, -len(x) % rows), (0, 0))).reshape(shape).sum((1, 3))
    return _Candidate(codes, undefined, scale_bytes, fp32(error))


def _round_scale(raw: np.ndarray, spec: QuantizerSpec) -> np.ndarray:
    if spec.block_scale_format is BlockScaleFormat.E8M0:
        exponent = np.where(raw > 0, np.frexp(raw)[1] - 1, -127)
        return (np.clip(exponent, -127, 127) + 127).astype(np.uint8)
    zero = raw == 0  # where S is 0 as well, a zero block's scale is NaN, and stays that
    if spec.block_scale_floor is not BlockScaleFloor.NONE:
        raw = np.maximum(raw, evaluate(str(spec.block_scale_floor), {}))
    found = np.where(np.isnan(raw), SCALE_NAN, nearest_even(np.nan_to_num(raw), E4M3)).astype(np.uint8)
    if spec.zero_block is ZeroBlock.UNIT_IF_ZERO:
        found = np.where(zero, nearest_even(np.array(1.0), E4M3), found)
    elif spec.zero_block is ZeroBlock.EIGHTH_IF_BYTE_ZERO:
        found = np.where(found == 0, nearest_even(np.array(0.125), E4M3), found)
    return found


def _codes(x: np.ndarray, spec: QuantizerSpec, names: Names) -> tuple[np.ndarray, np.ndarray]:
    """uint8 like x, and where they mean nothing. names: what the quotient's formula and the conditions on a block
    speak of.
    """
    saturate = spec.quotient in SATURATING_FACTORS
    quotient = np.broadcast_to(evaluate(str(spec.quotient), names, saturate=saturate), x.shape)
    values = VALUES[spec.element]
    condition, _, rule = str(spec.underflow_codes).partition(":")
    underflow = _holds(condition, names) if rule else np.zeros(x.shape, bool)
    if rule == "factor=0":
        with np.errstate(invalid="ignore"):
            quotient = np.where(underflow, x * 0.0, quotient)
    unknown = np.isnan(quotient)
    code = nearest_even(np.abs(np.where(unknown, values[-1], quotient)), values)
    negative = np.signbit(x) & ~unknown
    if spec.negative_zero is NegativeZero.POSITIVE:
        negative &= quotient != 0
    code = code + SIGN[spec.element] * negative.astype(np.uint8)
    undefined = unknown & (spec.non_finite is NonFinite.PROPAGATE)
    return np.where(underflow & (rule == "codes=0"), 0, code).astype(np.uint8), undefined


def _expected(candidate: _Candidate, scales: dict[str, Any], spec: QuantizerSpec) -> Expected:
    s = per_element(decode_scales(candidate.scale_bytes, spec), spec, candidate.codes.shape)
    values = decode_codes(candidate.codes, spec) * s
    outer = (scales["A"], scales["S"], scales["g"])
    return Expected(candidate.codes, candidate.scale_bytes, *outer, values, candidate.undefined)


def _select(six: _Candidate, four: _Candidate, scales: dict[str, Any], spec: QuantizerSpec) -> Expected:
    """4 where its error is smaller. The errors are FP32 sums in an open order: close ones do not decide."""
    takes_four = four.error < six.error
    with np.errstate(invalid="ignore"):
        close = np.abs(four.error - six.error) <= 2.0**-18 * (four.error + six.error) + np.float32(2.0**-140)

    def merge(takes: np.ndarray) -> Expected:
        element = per_element(takes, spec, six.codes.shape)
        codes = np.where(element, four.codes, six.codes)
        scale_bytes = np.where(takes, four.scale_bytes, six.scale_bytes)
        undefined = six.undefined | four.undefined
        return _expected(_Candidate(codes, undefined, scale_bytes, six.error), scales, spec)

    best = merge(takes_four)
    return Expected(**{**vars(best), "other": (merge(~takes_four), close)})

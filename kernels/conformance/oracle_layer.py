"""The expert layer of `kernels.spec` a second time: numpy, float64, token slot by token slot.

What the spec leaves open (the order of a sum) is a value with a slack: how far from it a correct back end may be.
A sum whose partial sums are FP32 numbers in every order has no slack, and most checks are made of such sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.conformance import oracle
from kernels.conformance.formula import bf16, evaluate, fp32
from kernels.conformance.oracle import Undetermined
from kernels.quantizer_spec import QuantizerSpec, ScaleDomain
from kernels.spec import (
    Accumulation,
    Combine,
    Epilogue,
    ExecutionSpec,
    FloatType,
    RouterPosition,
    Swiglu,
)

FP32_UNIT, BF16_UNIT = 2.0**-24, 2.0**-8
GROUP = 16  # elements along K that an ordered accumulation sums at once


@dataclass(frozen=True)
class Value:
    """float64 numbers, and how far from them a correct back end's may be (0: the same bits)."""

    value: np.ndarray
    slack: np.ndarray

    @classmethod
    def exact(cls, value: np.ndarray) -> Value:
        return cls(value, np.zeros_like(value))

    def cast(self, kind: FloatType) -> Value:
        """Rounded to `kind`. Two numbers that are close before may be one unit farther apart afterwards."""
        value = bf16(self.value) if kind is FloatType.BF16 else fp32(self.value)
        unit = BF16_UNIT if kind is FloatType.BF16 else FP32_UNIT
        return Value(value, np.where(self.slack > 0, self.slack + 2 * unit * np.abs(value), 0))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.value[index], self.slack[index])


@dataclass(frozen=True)
class Operand:
    """Rows as the product takes them. values: float64 [R, K]; decode, amax: g and A, [R, 1], or None."""

    values: np.ndarray
    decode: np.ndarray | None = None
    amax: np.ndarray | None = None

    @classmethod
    def of(cls, expected: oracle.Expected) -> Operand:
        rows = (len(expected.values), 1)
        decode, amax = (
            None if v is None else np.broadcast_to(v, rows) for v in (expected.decode, expected.amax)
        )
        return cls(expected.values, decode, amax)


@dataclass(frozen=True)
class Layer:
    """One call. x: [T, H], p: float64 [T, k] that holds FP32 values, ids: int [T, k]; w13, w2: an operand an expert."""

    x: np.ndarray
    ids: np.ndarray
    p: np.ndarray
    w13: list[Operand]
    w2: list[Operand]


def expert_layer(layer: Layer, spec: ExecutionSpec) -> Value:
    """The output [T, H]. Raises Undetermined when an open order could change what is quantised for FC2."""
    tokens, top_k = layer.ids.shape
    x = Value.exact(layer.x).cast(spec.operand)
    p = bf16(layer.p) if spec.router_coefficient is FloatType.BF16 else layer.p
    rows = Value.exact(np.zeros((tokens, top_k, layer.x.shape[1])))
    for expert in np.unique(layer.ids):
        where = np.nonzero(layer.ids == expert)
        fc1 = _linear(x[where[0]], layer.w13[expert], spec).cast(spec.fc1_output)
        activation = _swiglu(fc1, p[where][:, None], spec)
        fc2 = _linear(activation, layer.w2[expert], spec).cast(spec.fc2_output)
        rows.value[where], rows.slack[where] = fc2.value, fc2.slack
    return _combine(rows, layer.ids, p, spec).cast(spec.output)


def _linear(x: Value, weight: Operand, spec: ExecutionSpec) -> Value:
    """[R, K] of one expert times its [N, K], with outer scales, in FP32."""
    operand = _operand(x, spec.activation)
    accumulator = _accumulate(operand.values, weight.values, spec.accumulation)
    carried = x.slack @ np.abs(weight.values).T if spec.activation is None else 0
    names = {"acc": accumulator.value, "gx": np.ones(1), "gw": np.ones(1)}
    for side, rows, quantizer in (("x", operand, spec.activation), ("w", weight, spec.weight)):
        if quantizer is not None and rows.decode is not None and rows.amax is not None:
            decode, amax = (v if side == "x" else v.T for v in (rows.decode, rows.amax))
            largest = oracle.VALUES[quantizer.element][-1] * (quantizer.block_scale_max or 1)
            names |= {f"g{side}": decode, f"A{side}": amax, f"M{side}": np.array(largest)}
    formula = "acc" if spec.epilogue is Epilogue.NONE else str(spec.epilogue)
    slack = (accumulator.slack + carried) * np.abs(names["gx"] * names["gw"]) * (1 + 2.0**-20)
    return Value(evaluate(formula, names), slack)


def _operand(x: Value, quantizer: QuantizerSpec | None) -> Operand:
    if quantizer is None:
        return Operand(x.value)
    if x.slack.any():
        raise Undetermined("the order of FC1's sums is open, and they are not exact: FC2's codes may differ")
    expected = oracle.quantize(x.value, quantizer)
    if expected.other is not None and expected.other[1].any():
        raise Undetermined("the errors of two candidates of 4over6 are too close to tell")
    return Operand.of(expected)


def _accumulate(x: np.ndarray, weight: np.ndarray, order: Accumulation) -> Value:
    """float64 [R, K], [N, K] -> [R, N]: sums of exact products, rounded to FP32 as `order` says."""
    width = GROUP if order in _ORDERED else x.shape[1]
    starts = range(0, x.shape[1], width)
    groups = [_exact_sums(x[:, k : k + width], weight[:, k : k + width]) for k in starts]
    if order is Accumulation.TREE:
        while len(groups) > 1:
            pairs = [fp32(a + b) for a, b in zip(groups[0::2], groups[1::2], strict=False)]
            groups = pairs + groups[len(pairs) * 2 :]
    total = groups[0]
    for group in groups[1:]:
        total = fp32(total + group)
    magnitude = np.abs(x) @ np.abs(weight).T
    granule = _granule(x)[:, None] * _granule(weight)[None]
    exact = (magnitude <= granule / FP32_UNIT) | (order in _ORDERED)
    return Value(total, np.where(exact, 0, x.shape[1] * 2 * FP32_UNIT * magnitude))


_ORDERED = (Accumulation.BLOCKS_IN_ORDER, Accumulation.TREE)


def _exact_sums(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Exact products, summed exactly, rounded to FP32."""
    granule = _granule(x)[:, None] * _granule(weight)[None]
    if (np.abs(x) @ np.abs(weight).T <= granule * 2.0**53).all():  # then float64 has every partial sum
        return fp32(x @ weight.T)
    sums = [[math.fsum(row * column) for column in weight] for row in x]
    return fp32(np.array(sums).reshape(len(x), len(weight)))


def _granule(rows: np.ndarray) -> np.ndarray:
    """[R]: the largest power of two that divides every element of a row."""
    mantissa, exponent = np.frexp(rows)
    whole = np.abs(np.nan_to_num(mantissa) * 2.0**53).astype(np.int64)
    lowest = np.ldexp((whole & -whole).astype(np.float64), exponent - 53)
    return np.where(whole == 0, np.inf, lowest).min(1)


def _swiglu(fc1: Value, p: np.ndarray, spec: ExecutionSpec) -> Value:
    """[R, 2F], p [R, 1] -> [R, F], the input of FC2, with the router coefficient where it belongs."""
    half = fc1.value.shape[1] // 2
    gate, up = fc1[:, :half], fc1[:, half:]
    with np.errstate(over="ignore"):
        silu = fp32(gate.value / (1 + np.exp(-gate.value)))
    slack = 1.1 * gate.slack * np.abs(up.value) + np.abs(silu) * up.slack + gate.slack * up.slack
    if spec.swiglu is Swiglu.FP32_LIBRARY_SILU:
        slack = slack + 8 * FP32_UNIT * np.abs(silu * up.value)
    result = Value(fp32(silu * up.value), slack)
    if spec.router_position is RouterPosition.FC2_OUTPUT:
        return result.cast(spec.swiglu_output)
    ahead = spec.router_position is RouterPosition.SWIGLU_BEFORE_CAST
    if not ahead:
        result = result.cast(spec.swiglu_output)
    product = Value(fp32(p * result.value), np.abs(p) * result.slack).cast(spec.router_product)
    return product.cast(spec.swiglu_output) if ahead else product


def _combine(rows: Value, ids: np.ndarray, p: np.ndarray, spec: ExecutionSpec) -> Value:
    """FC2 rows [T, k, H] -> their sum [T, H]."""
    if spec.combine is Combine.SLOT_ORDER_FMA:
        chain = fp32(p[:, 0, None] * rows.value[:, 0])
        for slot in range(1, ids.shape[1]):
            chain = fp32_fma(p[:, slot, None], rows.value[:, slot], chain)
        return Value(chain, (np.abs(p)[..., None] * rows.slack).sum(1))
    terms = rows
    if spec.router_position is RouterPosition.FC2_OUTPUT:
        product = Value(fp32(p[..., None] * rows.value), np.abs(p)[..., None] * rows.slack)
        terms = product.cast(spec.router_product)
    if spec.combine is Combine.EXPERT_ORDER:
        order = np.argsort(ids, axis=1, kind="stable")
        terms = terms[np.arange(len(ids))[:, None], order]
    total = terms[:, 0].cast(spec.combine_sum)
    for slot in range(1, ids.shape[1]):
        added = Value(fp32(total.value + terms.value[:, slot]), total.slack + terms.slack[:, slot])
        total = added.cast(spec.combine_sum)
    unit = BF16_UNIT if spec.combine_sum is FloatType.BF16 else FP32_UNIT
    magnitude = np.abs(terms.value).sum(1)
    fixed = spec.combine is not Combine.ANY_ORDER or ids.shape[1] == 1
    return Value(total.value, total.slack + (0 if fixed else 2 * ids.shape[1] * unit * magnitude))


def fp32_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once to FP32. The product is exact in float64; the sum is first rounded to odd there."""
    product = a * b
    total = product + c
    # Knuth's two-sum: what the float64 sum lost. Rounding to odd makes the second rounding see it.
    high = total - product
    error = (product - (total - high)) + (c - high)
    even = np.ascontiguousarray(total).view(np.int64) & 1 == 0
    odd = np.where((error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return fp32(odd)


def weight_operands(weight: np.ndarray, spec: ExecutionSpec, *, halves: bool) -> list[Operand]:
    """float64 [E, N, K] in the operand's type -> what the product takes of every expert."""
    if spec.weight is None:
        return [Operand(matrix) for matrix in weight]
    return [matrix_operand(quantize_matrix(matrix, spec.weight, halves=halves)) for matrix in weight]


def quantize_matrix(matrix: np.ndarray, spec: QuantizerSpec, *, halves: bool) -> list[oracle.Expected]:
    """One expert's [N, K]: in one part, or the gate and the up half apart when each has outer scales of its own."""
    apart = halves and spec.outer_domain is ScaleDomain.EXPERT_HALF
    return [oracle.quantize(part, spec) for part in np.split(matrix, 2 if apart else 1)]


def matrix_operand(parts: list[oracle.Expected]) -> Operand:
    operands = [Operand.of(part) for part in parts]

    def joined(name: str) -> np.ndarray | None:
        found = [getattr(operand, name) for operand in operands]
        return None if found[0] is None else np.concatenate(found)

    values = joined("values")
    assert values is not None
    return Operand(values, joined("decode"), joined("amax"))

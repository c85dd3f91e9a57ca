"""The expert layer under any execution spec, written a second time: numpy, token by token, from the spec's text.

Takes quantised operands from `kernels.quantize` (which has tests of its own) in FP64, and does everything else in
FP64 with each rounding spelled out. Products of quantised operands are exact there; float32 products and sums are
FP64 results rounded again, which changes nothing, because 53 bits are at least twice 24 plus 2.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from nvfp4_oracle import bf16, f32

from kernels.quantize import QuantizedTensor, decode, decode_scale, quantize_activation, quantize_weight
from kernels.quantizer_spec import QuantizerSpec, ScaleDomain
from kernels.spec import ExecutionSpec

LARGEST = {"e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0, "e4m3": 448.0}


class Operand(NamedTuple):
    """Rows as a product takes them: values [R, K], and scales [R] as the epilogue takes them (None: absent)."""

    values: np.ndarray
    scales: np.ndarray | None


class Layer(NamedTuple):
    output: np.ndarray  # [T, H]
    fc1: np.ndarray  # [T, k, 2F]
    act: np.ndarray  # [T, k, F], FC2's input before it is quantised
    fc2: np.ndarray  # [T, k, H]


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    return bf16(f32(x)) if kind == "bf16" else f32(x)


def expert_layer(
    x: torch.Tensor,
    ids: torch.Tensor,
    p: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    spec: ExecutionSpec,
) -> Layer:
    operand = torch.bfloat16 if spec.operand == "bf16" else torch.float32
    tokens, top_k = ids.shape
    ffn = w2.shape[-1]
    coefficients = rounded(p.double().numpy(), spec.router_coefficient)
    slots = [(t, j, int(ids[t, j])) for t in range(tokens) for j in range(top_k)]
    inputs = np.stack([x[t].to(operand).double().numpy() for t, _, _ in slots])
    fc1 = rounded(_linear(inputs, slots, w13.to(operand), spec, operand, halves=2), spec.fc1_output)
    gate, up = fc1[:, :ffn], fc1[:, ffn:]
    act = f32(f32(gate / (1 + np.exp(-gate))) * up)
    own = np.array([coefficients[t, j] for t, j, _ in slots])[:, None]
    if spec.router_position == "swiglu_before_cast":
        act = rounded(own * act, spec.router_product)
    act = rounded(act, spec.swiglu_output)
    if spec.router_position == "swiglu_output":
        act = rounded(own * act, spec.router_product)
    last = spec.router_product if spec.router_position == "swiglu_output" else spec.swiglu_output
    stored = torch.bfloat16 if last == "bf16" else torch.float32
    fc2 = rounded(_linear(act, slots, w2.to(operand), spec, stored), spec.fc2_output)

    shape = (tokens, top_k, -1)
    output = np.stack(
        [_combine(row, coefficients[t], ids[t], spec) for t, row in enumerate(fc2.reshape(shape))]
    )
    return Layer(output, fc1.reshape(shape), act.reshape(shape), fc2.reshape(shape))


def _linear(
    rows: np.ndarray,
    slots: list[tuple[int, int, int]],
    weights: torch.Tensor,
    spec: ExecutionSpec,
    kind: torch.dtype,
    halves: int = 1,
) -> np.ndarray:
    """Rows [S, K], slots' experts, weights [E, N, K] -> float32 values [S, N]. halves: 2 for gate and up."""
    output = np.zeros((len(rows), weights.shape[1]))
    for expert in range(len(weights)):
        own = [i for i, slot in enumerate(slots) if slot[2] == expert]
        if not own:
            continue
        left = _activation(torch.from_numpy(rows[own]).to(kind), spec)
        right = _weight(weights[expert], spec, halves)
        for i, row in enumerate(own):
            scale = None if left.scales is None else left.scales[i]
            accumulator = f32(_sum(left.values[i] * right.values, spec.accumulation))
            output[row] = _epilogue(accumulator, scale, right.scales, spec)
    return output


def _activation(rows: torch.Tensor, spec: ExecutionSpec) -> Operand:
    """The rows routed to one expert."""
    if spec.activation is None:
        return Operand(rows.double().numpy(), None)
    return _operand(quantize_activation(rows, spec.activation), spec.activation, spec, len(rows))


def _weight(weight: torch.Tensor, spec: ExecutionSpec, halves: int) -> Operand:
    """One expert's [N, K]."""
    if spec.weight is None:
        return Operand(weight.double().numpy(), None)
    if spec.weight.outer_domain is ScaleDomain.EXPERT_HALF:  # two matrices, each with one scale
        own = replace(spec, weight=replace(spec.weight, outer_domain=ScaleDomain.EXPERT))
        parts = [_weight(part, own, 1) for part in weight.chunk(halves)]
        values, scales = zip(*parts, strict=True)
        return Operand(np.concatenate(values), np.concatenate(scales))
    return _operand(quantize_weight(weight[None], spec.weight), spec.weight, spec, len(weight))


def _operand(quantized: QuantizedTensor, quantizer: QuantizerSpec, spec: ExecutionSpec, rows: int) -> Operand:
    values = decode(quantized, quantizer).double().numpy().reshape(rows, -1)
    scales = quantized.outer_scales if "Ax" in spec.epilogue else decode_scale(quantized, quantizer)
    return Operand(values, None if scales is None else np.broadcast_to(scales.double().numpy().ravel(), rows))


def _sum(products: np.ndarray, order: str) -> np.ndarray:
    """[N, K] -> [N]."""
    if order in ("fp32_any_order", "fp32_gemm"):
        return products.sum(1)
    blocks = [f32(products[:, start : start + 16].sum(1)) for start in range(0, products.shape[1], 16)]
    if order == "fp32_blocks_in_order":
        total = blocks[0]
        for block in blocks[1:]:
            total = f32(total + block)
        return total
    while len(blocks) > 1:
        pairs = [f32(a + b) for a, b in zip(blocks[::2], blocks[1::2], strict=False)]
        blocks = pairs + blocks[2 * len(pairs) :]
    return blocks[0]


def _epilogue(acc: np.ndarray, x: np.ndarray | None, w: np.ndarray | None, spec: ExecutionSpec) -> np.ndarray:
    """acc [N], x a scalar, w [N]."""
    one = np.ones(1)
    x, w = one if x is None else x, one if w is None else w
    if spec.epilogue == "none":
        return acc
    if spec.epilogue == "acc*(gx*gw)":
        return f32(acc * f32(x * w))
    if spec.epilogue == "(acc*gx)*gw":
        return f32(f32(acc * x) * w)
    quantizers = [q for q in (spec.activation, spec.weight) if q is not None]
    inverse = f32(1 / np.prod([LARGEST[q.element] * (q.block_scale_max or 1) for q in quantizers]))
    if spec.epilogue == "acc*((Ax*Aw)*(1/(Mx*Mw)))":
        return f32(acc * f32(f32(x * w) * inverse))
    assert spec.epilogue == "(acc*(1/(Mx*Mw)))*(Ax*Aw)"
    return f32(f32(acc * inverse) * f32(x * w))


def _combine(rows: np.ndarray, p: np.ndarray, ids: torch.Tensor, spec: ExecutionSpec) -> np.ndarray:
    """[k, H], [k] -> [H]."""
    order = (
        sorted(range(len(p)), key=lambda j: int(ids[j])) if spec.combine == "expert_order" else range(len(p))
    )
    total = np.zeros(rows.shape[1])
    for count, j in enumerate(order):
        if spec.combine == "slot_order_fma" and count:
            total = np.array([_fma(p[j], y, c) for y, c in zip(rows[j], total, strict=True)])
            continue
        term = (
            rounded(p[j] * rows[j], spec.router_product) if spec.router_position == "fc2_output" else rows[j]
        )
        total = rounded(total + term, spec.combine_sum)
    return rounded(total, spec.output)


def _fma(a: float, b: float, c: float) -> float:
    return nearest_float32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def nearest_float32(value: Fraction) -> float:
    """Nearest even, below the overflow threshold."""
    if value == 0:
        return 0.0
    # A first guess by FP64, then the exact choice among its neighbours.
    guess = np.float32(float(value))
    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return float(
        min(near, key=lambda f: (abs(Fraction(float(f)) - value), int(np.float32(f).view(np.uint32)) & 1))
    )

"""NVFP4 and the `minite` expert layer written a second time, in numpy, from the formulas alone.

Everything is float64 with the roundings spelled out. Float32 quotients and products are float64 results
rounded again, which changes nothing, because 53 bits are at least twice 24 plus 2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


def _format_values(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Non-negative values of a small floating-point format, by bit pattern, NaN and infinity aside."""
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            scale = 2.0 ** (max(exponent, 1) - bias)
            values.append(scale * (fraction if exponent == 0 else 1 + fraction))
    return np.array(values)


E2M1 = _format_values(2, 1, bias=1)
E4M3 = _format_values(4, 3, bias=7)[:127]  # pattern 0x7F is NaN


def nearest_even(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Patterns of the entries of `values` nearest to x >= 0; ties to the even pattern; saturating."""
    upper = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    below, above = x - values[upper - 1], values[upper] - x
    down = (below < above) | ((below == above) & (upper % 2 == 1))
    return np.where(down, upper - 1, upper).astype(np.uint8)


def f32(x: np.ndarray) -> np.ndarray:
    """float64 rounded to float32, kept as float64."""
    return np.asarray(x, np.float32).astype(np.float64)


def bf16(x: np.ndarray) -> np.ndarray:
    """float64 that holds float32 values, rounded to nearest-even BF16 by bit arithmetic."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
    return bits.view(np.float32).astype(np.float64)


class Quantized(NamedTuple):
    codes: np.ndarray  # [R, K], one per element
    block_scales: np.ndarray  # [R, K/16]
    outer_scales: np.ndarray  # [R, 1] or [1, 1], float64
    decoded: np.ndarray  # [R, K], code times block scale


def quantize(x: np.ndarray, shared_scale: bool = False) -> Quantized:
    """x: float64 [R, K] that holds BF16 values; one outer scale per row, or one for all rows."""
    blocks = x.reshape(len(x), -1, 16)
    block_amax = np.abs(blocks).max(-1)
    amax = block_amax.max(keepdims=True) if shared_scale else block_amax.max(-1, keepdims=True)
    outer = np.where(amax < 2.0**-100, 1.0, f32(amax / 2688.0))
    block_scales = nearest_even(f32(block_amax / f32(6.0 * outer)), E4M3)
    step = f32(E4M3[block_scales] * outer)[..., None]
    scaled = f32(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    codes = nearest_even(np.abs(scaled), E2M1) + 8 * np.signbit(blocks).astype(np.uint8)
    codes = np.where(block_scales[..., None] == 0, 0, codes).astype(np.uint8)
    decoded = np.concatenate([E2M1, -E2M1])[codes] * E4M3[block_scales][..., None]
    return Quantized(codes.reshape(x.shape), block_scales, outer, decoded.reshape(x.shape))


class Layer(NamedTuple):
    output: np.ndarray  # [T, H]
    fc1: np.ndarray  # [T, k, 2F]
    swiglu: np.ndarray  # [T, k, F]
    fc2: np.ndarray  # [T, k, H]


def expert_layer(
    x: np.ndarray,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    w13: np.ndarray,
    w2: np.ndarray,
    per_expert: bool = False,
    quantized: bool = True,
) -> Layer:
    """The layer under `minite` (`minite_expert` when per_expert, `bf16` when not quantized), token by token.

    x [T, H], w13 [E, 2F, H], w2 [E, H, F] hold BF16 values, topk_weights [T, k] float32 values, as float64.
    """

    def linear(row: np.ndarray, weight: np.ndarray | Quantized) -> np.ndarray:
        if isinstance(weight, np.ndarray):
            return bf16(f32(weight @ row))
        operand = quantize(row[None])
        factor = f32(operand.outer_scales[0] * weight.outer_scales[:, 0])
        return bf16(f32(f32(weight.decoded @ operand.decoded[0]) * factor))

    def prepare(weight: np.ndarray) -> list:
        return [quantize(matrix, per_expert) for matrix in weight] if quantized else list(weight)

    tokens, top_k = topk_ids.shape
    ffn = w2.shape[-1]
    first, second = prepare(w13), prepare(w2)
    fc1 = np.zeros((tokens, top_k, 2 * ffn))
    swiglu = np.zeros((tokens, top_k, ffn))
    fc2 = np.zeros((tokens, top_k, x.shape[1]))
    output = np.zeros_like(x)
    for t in range(tokens):
        total = np.zeros(x.shape[1])
        for j in range(top_k):
            expert = int(topk_ids[t, j])
            fc1[t, j] = linear(x[t], first[expert])
            gate, up = fc1[t, j, :ffn], fc1[t, j, ffn:]
            swiglu[t, j] = bf16(f32(f32(gate / (1 + np.exp(-gate))) * up))
            fc2[t, j] = linear(swiglu[t, j], second[expert])
            total = f32(total + f32(topk_weights[t, j] * fc2[t, j]))
        output[t] = bf16(total)
    return Layer(output, fc1, swiglu, fc2)

"""Quantisers whose libraries do not run here, written from their sources in float64, operation by operation.

A float64 sum, product or quotient of FP32 numbers, rounded to FP32, is correctly rounded, because 53 bits are
at least twice 24 plus 2. Inputs are float64 [R, K] that hold BF16 numbers. `rcp` is the approximate reciprocal
of the hardware, taken as correctly rounded with subnormal numbers flushed: nothing is claimed about its last bit.
"""

from __future__ import annotations

import numpy as np
from nvfp4_oracle import E2M1, E4M3, bf16, f32, nearest_even

from oracles.result import Result

FP32_MAX = float(np.finfo(np.float32).max)
BF16_MAX = float.fromhex("0x1.fep127")
SIXTH = f32(np.float64(1) / 6)
INVERSE_M = f32(np.float64(1) / 2688)


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, 0.0, x)


def rcp(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return flush(f32(1 / flush(x)))


def div(a: np.ndarray | float, b: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return f32(np.asarray(a, np.float64) / b)


def mul(a: np.ndarray | float, b: np.ndarray | float) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return f32(np.asarray(a, np.float64) * b)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """`cvt.rn.satfinite.e4m3x2.f32` of x >= 0."""
    return nearest_even(np.minimum(x, 448.0), E4M3)


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """`cvt.rn.satfinite.e2m1x2.f32`: the sign of zero is kept, NaN becomes 6."""
    codes = nearest_even(np.abs(np.where(np.isnan(x), 6.0, x)), E2M1)
    return np.where(np.isnan(x), 7, codes + 8 * np.signbit(x)).astype(np.uint8)


def amaxes(x: np.ndarray, *, per_row: bool, tile: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks [R, K/16, 16], their largest magnitudes [R, K/16] (of `tile` rows), those of the groups [R, 1]."""
    blocks = x.reshape(len(x), -1, 16)
    amax = np.abs(blocks).max(-1)
    if tile > 1:
        amax = amax.reshape(len(x) // tile, tile, -1).max(1).repeat(tile, 0)
    group = np.abs(x).max(-1, keepdims=True) if per_row else np.full((len(x), 1), np.abs(x).max())
    return blocks, amax, group


def result(codes: np.ndarray, scales: np.ndarray, outer: np.ndarray, *, per_row: bool) -> Result:
    stored = outer[:, 0] if per_row else outer[0]
    return Result(codes.reshape(len(codes), -1), scales, stored.astype(np.float32))


def te_encode_scale(amax: np.ndarray) -> np.ndarray:
    """compute_global_encode_scaling_factor_FP4."""
    return np.where(amax == 0, 1.0, np.minimum(div(2688.0, amax), FP32_MAX))


def transformer_engine(x: np.ndarray, *, per_row: bool = False, tile: int = 1) -> Result:
    """core_nvfp4.cuh with a scaling coefficient in FP32; stores A. tile: 16 for blocks of 16 rows."""
    blocks, amax, group = amaxes(x, per_row=per_row, tile=tile)
    encode = te_encode_scale(group)
    scales = to_e4m3(np.minimum(mul(amax, mul(encode, SIXTH)), FP32_MAX))
    factor = np.minimum(div(1.0, mul(E4M3[scales], div(1.0, encode))), FP32_MAX)
    return result(to_e2m1(mul(blocks, factor[..., None])), scales, group, per_row=per_row)


def transformer_engine_fast_math(x: np.ndarray) -> Result:
    """The same with a coefficient in BF16; fma.rn.f32.bf16 with an addend of +0 makes +0 of -0."""
    blocks, amax, group = amaxes(x, per_row=False)
    encode = te_encode_scale(group)
    scales = to_e4m3(mul(amax, mul(encode, SIXTH)))
    factor = bf16(np.minimum(div(encode, E4M3[scales]), BF16_MAX))
    return result(to_e2m1(mul(blocks, factor[..., None]) + 0.0), scales, group, per_row=False)


def flashinfer_fast(x: np.ndarray, *, guard_on_byte: bool) -> Result:
    """nvfp4QuantAndPerTokenScaleKernel and cvt_warp_fp16_to_fp4; the guard was on the largest magnitude before."""
    blocks, amax, group = amaxes(x, per_row=True)
    g = flush(mul(group, INVERSE_M))
    encode = np.where(g != 0, rcp(g), 0.0)
    scales = to_e4m3(mul(encode, mul(amax, rcp(np.float64(6)))))
    nonzero = scales != 0 if guard_on_byte else amax != 0
    with np.errstate(invalid="ignore"):
        factor = np.where(nonzero, rcp(mul(E4M3[scales], rcp(encode))), 0.0)
    return result(to_e2m1(mul(blocks, factor[..., None])), scales, g, per_row=True)


def vllm_cuda(x: np.ndarray) -> Result:
    """cvt_warp_fp16_to_fp4 of nvfp4_utils.cuh; S as PyTorch divides a number by a tensor."""
    blocks, amax, group = amaxes(x, per_row=False)
    encode = mul(div(1.0, np.maximum(group, f32(np.float64(1e-8)))), 2688.0)
    scales = to_e4m3(mul(encode, mul(amax, rcp(np.float64(6)))))
    factor = np.where(scales != 0, rcp(mul(E4M3[scales], rcp(encode))), 0.0)
    return result(to_e2m1(mul(blocks, factor[..., None])), scales, div(1.0, encode), per_row=False)


def mslk(x: np.ndarray) -> Result:
    """nvfp4_quantize_stacked_with_token_scale; its division by 2688 is `/`, taken as correctly rounded."""
    blocks, amax, group = amaxes(x, per_row=True)
    g = div(np.maximum(group, f32(np.float64(1e-8))), np.float64(2688))
    encode = div(1.0, g)
    scales = to_e4m3(np.clip(mul(div(amax, np.float64(6)), encode), 2.0**-9, 448.0))
    factor = div(encode, E4M3[scales])
    return result(to_e2m1(mul(blocks, factor[..., None])), scales, g, per_row=True)

"""NVFP4 quantisation and its inverse, as an execution spec says.

For an element x of a block with largest magnitude a, of an outer group with largest magnitude A, and fl() one
rounding to FP32:

    g = fl(A / 2688)                      2688 = 6 * 448, the largest code times the largest block scale
    s = E4M3(fl(a / fl(6 * g)))           nearest-even, saturating
    code = E2M1(fl(x / fl(s * g)))        nearest-even, saturating; 0 in a block whose s is 0

Division is true division, not a product with a reciprocal. A group with A < 2^-100 is a zero group: g = 1,
hence s = 0 and codes 0. That keeps g and the smallest s * g (about 2^-9 * 2^-112) normal in FP32, so that
hardware which flushes subnormal numbers computes the same codes. A negative element that rounds to zero has
code 8, as has -0, except in a block whose s is 0. Values that are not finite are refused: most quantisers
hide a NaN as a 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels import codec_e2m1, codec_e4m3
from kernels.packing import decode_packed, pack
from kernels.spec import ActivationScaleDomain, ExecutionSpec, WeightScaleDomain

BLOCK = 16
OUTER_DIVISOR = codec_e2m1.MAX * codec_e4m3.MAX  # 2688
ZERO_GROUP_BELOW = math.ldexp(1.0, -100)
_CHUNK_ELEMENTS = 1 << 16  # elements rounded at a time: the temporaries stay in the cache


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """An NVFP4 tensor [..., N, K].

    codes: uint8 [..., N, K/2], the even element in the low nibble
    block_scales: uint8 [..., N, K/16], E4M3 bytes
    outer_scales: float32, the decode scales g; weights [E, N, K]: [E, N] (row) or [E, 1] (expert),
        activations [T, K]: [T, 1] (token) or [1, 1] (tensor)
    """

    codes: torch.Tensor
    block_scales: torch.Tensor
    outer_scales: torch.Tensor


def quantize_weight(weight: torch.Tensor, spec: ExecutionSpec) -> QuantizedTensor:
    """[E, N, K] of any float type -> NVFP4; the weight is cast to BF16 first.

    Raises ValueError when the spec is not NVFP4, K is not a multiple of 16, or a value is not finite in BF16.
    """
    if weight.dim() != 3 or len(weight) == 0:
        raise ValueError(f"a weight must be [E, N, K] with E >= 1, got {tuple(weight.shape)}")
    per_expert = spec.weight_scale_domain is WeightScaleDomain.EXPERT
    experts = [_quantize(w, spec, per_expert, f"weight of expert {e}") for e, w in enumerate(weight)]
    return QuantizedTensor(
        codes=torch.stack([expert.codes for expert in experts]),
        block_scales=torch.stack([expert.block_scales for expert in experts]),
        outer_scales=torch.stack([expert.outer_scales[:, 0] for expert in experts]),
    )


def quantize_activation(x: torch.Tensor, spec: ExecutionSpec) -> QuantizedTensor:
    """[T, K] of any float type -> NVFP4; x is cast to BF16 first. T may be 0.

    Raises ValueError when the spec is not NVFP4, K is not a multiple of 16, or a value is not finite in BF16.
    """
    if x.dim() != 2:
        raise ValueError(f"an activation must be [T, K], got {tuple(x.shape)}")
    return _quantize(x, spec, spec.activation_scale_domain is ActivationScaleDomain.TENSOR, "activation")


def decode(quantized: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., N, K] of `dtype`: code times block scale, without the outer scale.

    Exact in bfloat16 and wider: a product has at most 6 significant bits, and is 0 or in [2^-10, 2688].
    """
    elements = decode_packed(quantized.codes).unflatten(-1, (-1, BLOCK))
    scales = codec_e4m3.decode(quantized.block_scales, torch.bfloat16).unsqueeze(-1)
    return (elements * scales).flatten(-2).to(dtype)


def dequantize(quantized: QuantizedTensor) -> torch.Tensor:
    """float32 [..., N, K]: code times block scale (exact) times outer scale (one FP32 rounding)."""
    outer = quantized.outer_scales
    if quantized.codes.dim() == 3:
        outer = outer.unsqueeze(-1)
    return decode(quantized).float() * outer


def _quantize(x: torch.Tensor, spec: ExecutionSpec, shared_scale: bool, what: str) -> QuantizedTensor:
    """[R, K] -> NVFP4 with outer scales [R, 1], or [1, 1] when all rows share one."""
    rows, width = x.shape
    if not spec.quantized:
        raise ValueError(f"cannot quantise {what}: execution spec {spec.name!r} has format {spec.format}")
    if width == 0 or width % BLOCK:
        raise ValueError(
            f"NVFP4 needs rows of a positive multiple of {BLOCK} elements, got {what} {tuple(x.shape)}"
        )
    x = x.detach().to(torch.bfloat16)
    # The bit patterns of non-negative BF16 numbers are ordered as their values are, and NaN comes last.
    magnitude_bits = x.view(torch.int16) & 0x7FFF
    block_amax = magnitude_bits.view(rows, width // BLOCK, BLOCK).amax(-1).view(torch.bfloat16).float()
    _refuse_non_finite(x, block_amax, what)

    # A tensor, because on a GPU torch turns division by a number into a product with its reciprocal.
    divisor = block_amax.new_tensor([[OUTER_DIVISOR]])
    if shared_scale:
        amax = block_amax.amax().view(1, 1) if rows else block_amax.new_zeros(1, 1)
    else:
        amax = block_amax.amax(-1, keepdim=True)
    outer = torch.where(amax < ZERO_GROUP_BELOW, 1.0, amax / divisor)
    block_scales = codec_e4m3.encode(block_amax / (outer * codec_e2m1.MAX))
    zero_block = block_scales == 0
    # A step of 1 keeps 0/0 out; the codes of these blocks are cleared below.
    step = (codec_e4m3.decode(block_scales) * outer).masked_fill_(zero_block, 1.0)
    codes = _encode_elements(x, step)
    codes.view(rows, width // BLOCK, BLOCK // 2).masked_fill_(zero_block.unsqueeze(-1), 0)
    return QuantizedTensor(codes, block_scales, outer)


def _encode_elements(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """bfloat16 [R, K] and its steps, float32 [R, K/16] -> packed codes of x / step, uint8 [R, K/2]."""
    rows, width = x.shape
    packed = torch.empty(rows, width // 2, dtype=torch.uint8, device=x.device)
    chunk = max(1, _CHUNK_ELEMENTS // width)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        divisor = step[part].unsqueeze(-1)
        scaled = x[part].float().view(*divisor.shape[:2], BLOCK) / divisor
        packed[part] = pack(codec_e2m1.encode(scaled).flatten(1))
    return packed


def _refuse_non_finite(x: torch.Tensor, block_amax: torch.Tensor, what: str) -> None:
    if not torch.isfinite(block_amax).all():
        nan, inf = int(x.isnan().sum()), int(x.isinf().sum())
        raise ValueError(
            f"cannot quantise {what} {tuple(x.shape)}: {nan} NaN and {inf} infinite values among {x.numel()},"
            " after the cast to bfloat16"
        )

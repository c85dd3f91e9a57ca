"""Quantisation as a `QuantizerSpec` says, and its inverse.

A row of K elements falls into blocks, and blocks into outer groups. From the largest magnitude of a group come
its outer scales, from these and the largest magnitude of a block its block scale, and from both the codes
(formulas in `kernels.scales`, formats in `kernels.formats`). Elements are taken as they come, BF16 or FP32, and
widened to FP32: a cast that a layer makes before quantisation is the layer's.

Most quantisers hide a NaN as the largest element. Where the spec says `refuse`, values that are not finite raise,
or are reported to `on_non_finite` for a later check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernels import codec_e4m3, codec_e8m0
from kernels.formats import ELEMENTS
from kernels.packing import decode_packed, pack
from kernels.quantizer_spec import (
    Block,
    BlockScaleFormat,
    CodeLayout,
    NegativeZero,
    NonFinite,
    OuterStored,
    QuantizerSpec,
    Rounding,
    ScaleDomain,
    ScaleLayout,
    Selector,
    Transform,
    UnderflowCodes,
)
from kernels.scales import (
    FP32_MAX,
    OuterScales,
    block_scales,
    element_step,
    outer_divisor,
    outer_scales,
    unit_outer,
)
from kernels.swizzle import swizzle_128x4, unswizzle_128x4
from kernels.transform import hadamard_16

TILE = 16  # rows of a 16x16 block
_CHUNK_ELEMENTS = 1 << 16  # elements rounded at a time: the temporaries stay in the cache ...
_CHUNK_ELEMENTS_GPU = 1 << 26  # ... where there is one to speak of; here they take a GiB or two
_BLOCK_WIDTH = {Block.ROW_16: 16, Block.ROW_32: 32, Block.TILE_16: 16}
_SHARED = (ScaleDomain.TENSOR, ScaleDomain.EXPERT, ScaleDomain.EXPERT_HALF)

NonFiniteReport = Callable[[torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantised [..., R, K]: activations [R, K], or weights [E, N, K].

    codes: uint8 [..., R, K/2] for 4-bit elements (the even element in the low nibble), else [..., R, K]
    block_scales: uint8 [..., R, K/16] (1x32: K/32; 16x16: [..., ceil(R/16), K/16]), in the order of the
        elements; None without blocks
    outer_scales: float32, the quantity that the spec stores; activations [R, 1] (token) or [1, 1] (tensor),
        weights [E, N] (row), [E, 1] (expert) or [E, 2] (expert_half); None without outer scales
    """

    codes: torch.Tensor
    block_scales: torch.Tensor | None
    outer_scales: torch.Tensor | None


def quantize_activation(
    x: torch.Tensor,
    spec: QuantizerSpec,
    *,
    seed: int | None = None,
    what: str = "activation",
    on_non_finite: NonFiniteReport | None = None,
) -> QuantizedTensor:
    """bfloat16 or float32 [R, K] -> quantised rows. R may be 0.

    seed: for stochastic rounding, which needs one. on_non_finite: where the spec refuses values that are not
    finite, takes a bool [R] of the rows that hold any, and nothing is raised; the result is then meaningless.

    Raises ValueError for another shape or type, a K that is no multiple of `spec.width_multiple`, values that the
    spec refuses, a missing seed.
    """
    if x.dim() != 2:
        raise ValueError(f"{what} must be [R, K], got {tuple(x.shape)}")
    return _quantize(x, spec, what, seed, on_non_finite)


def quantize_weight(weight: torch.Tensor, spec: QuantizerSpec, *, halves: bool = False) -> QuantizedTensor:
    """bfloat16 or float32 [E, N, K] -> quantised experts.

    halves: N holds gate rows, then as many up rows, which have outer scales of their own under `expert_half`.

    Raises ValueError as `quantize_activation` does, and for E = 0.
    """
    if weight.dim() != 3 or len(weight) == 0:
        raise ValueError(f"a weight must be [E, N, K] with E >= 1, got {tuple(weight.shape)}")
    parts = 2 if halves and spec.outer_domain is ScaleDomain.EXPERT_HALF else 1
    experts = [
        _join([_quantize(part, spec, f"weight of expert {e}") for part in w.chunk(parts)], torch.cat)
        for e, w in enumerate(weight)
    ]
    quantized = _join(experts, torch.stack)
    outer = quantized.outer_scales
    return replace(quantized, outer_scales=None if outer is None else outer.squeeze(-1))


def decode(
    quantized: QuantizedTensor, spec: QuantizerSpec, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[..., R, K] of `dtype`: code times block scale, without the outer scale.

    Exact in float32. Exact in bfloat16 for NVFP4 (at most 6 significant bits, 0 or in [2^-10, 2688]) and for
    the MX formats.
    """
    codes = quantized.codes
    elements = (
        decode_packed(codes)
        if spec.code_layout is CodeLayout.EVEN_LOW
        else ELEMENTS[spec.element].decode(codes, torch.bfloat16)
    )
    if quantized.block_scales is None:
        return elements.to(dtype)
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    scales = _decode_block_scales(quantized.block_scales, spec, wide)
    scales = _per_row(scales, spec, elements.shape[-2]).unsqueeze(-1)
    blocks = elements.unflatten(-1, (-1, _BLOCK_WIDTH[spec.block]))
    return (blocks * scales).flatten(-2).to(dtype)


def decode_scale(quantized: QuantizedTensor, spec: QuantizerSpec) -> torch.Tensor | None:
    """float32, the shape of `outer_scales`: the outer decode scale g; None where there is none."""
    stored = quantized.outer_scales
    if stored is None or spec.outer_stored is OuterStored.DECODE:
        return stored
    if spec.outer_stored is OuterStored.ENCODE:
        return 1 / stored
    return outer_scales(stored, spec).decode


def dequantize(quantized: QuantizedTensor, spec: QuantizerSpec) -> torch.Tensor:
    """float32 [..., R, K]: code times block scale (exact) times g (one FP32 rounding)."""
    values, outer = decode(quantized, spec), decode_scale(quantized, spec)
    if outer is None:
        return values
    if quantized.codes.dim() == 3:
        halves = outer.shape[-1] == 2 and spec.outer_domain is ScaleDomain.EXPERT_HALF
        outer = (outer.repeat_interleave(values.shape[-2] // 2, dim=-1) if halves else outer).unsqueeze(-1)
    return values * outer


def stored_scales(quantized: QuantizedTensor, spec: QuantizerSpec) -> torch.Tensor | None:
    """The block scales in the order in which the spec keeps them in memory.

    uint8: as `block_scales` under `linear`; [..., bytes] under `swizzled_128x4`, where every row has scales of its
    own, those of a 16x16 block 16 times; None without blocks.
    """
    scales = quantized.block_scales
    if scales is None or spec.scale_layout is not ScaleLayout.SWIZZLED_128X4:
        return scales
    return swizzle_128x4(_per_row(scales, spec, quantized.codes.shape[-2]))


def logical_scales(stored: torch.Tensor, spec: QuantizerSpec, rows: int, width: int) -> torch.Tensor:
    """The inverse of `stored_scales` for [..., rows, width] elements. Raises ValueError for another size."""
    if spec.scale_layout is not ScaleLayout.SWIZZLED_128X4:
        return stored
    scales = unswizzle_128x4(stored, rows, width // _BLOCK_WIDTH[spec.block])
    return scales[..., ::TILE, :].contiguous() if spec.block is Block.TILE_16 else scales


def _quantize(
    x: torch.Tensor,
    spec: QuantizerSpec,
    what: str,
    seed: int | None = None,
    on_non_finite: NonFiniteReport | None = None,
) -> QuantizedTensor:
    """[R, K] -> quantised, with outer scales [R, 1], or [1, 1] when all rows share one."""
    _check(x, spec, what, seed)
    x = x.detach().contiguous()
    if spec.transform is Transform.HADAMARD_16:
        x = hadamard_16(x).to(x.dtype)
    width = _BLOCK_WIDTH.get(spec.block, x.shape[1])
    block_amax = _block_amax(x, width)
    if spec.non_finite is NonFinite.REFUSE:
        _refuse_non_finite(x, block_amax, what, on_non_finite)
    elif spec.non_finite is NonFinite.SATURATE and not torch.isfinite(block_amax).all():
        block_amax = _block_amax(x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), width)

    outer = unit_outer(block_amax)
    if spec.outer_domain is not ScaleDomain.NONE:
        outer = outer_scales(_group_amax(block_amax, spec), spec)
    if spec.block is Block.TILE_16:
        rows = len(x)
        block_amax = torch.nn.functional.pad(block_amax, (0, 0, 0, -rows % TILE))
        block_amax = block_amax.view(-1, TILE, block_amax.shape[-1]).amax(1)
    codes, scales = _codes(x, block_amax, outer, spec, seed)
    stored = None if spec.outer_domain is ScaleDomain.NONE else outer.stored(spec)
    return QuantizedTensor(codes, scales, stored)


def _check(x: torch.Tensor, spec: QuantizerSpec, what: str, seed: int | None) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{what} must be bfloat16 or float32, got {x.dtype}")
    if x.shape[1] == 0 or x.shape[1] % spec.width_multiple:
        raise ValueError(
            f"{spec.element} with blocks of {spec.block} needs rows of a positive multiple of"
            f" {spec.width_multiple} elements, got {what} {tuple(x.shape)}"
        )
    if spec.transform is Transform.HADAMARD_16 and x.shape[1] % 16:
        raise ValueError(
            f"{spec.transform} needs rows of a multiple of 16 elements, got {what} {tuple(x.shape)}"
        )
    if (spec.rounding is Rounding.STOCHASTIC) is (seed is None):
        raise ValueError(f"rounding={spec.rounding} of {what}: seed={seed}")


def _block_amax(x: torch.Tensor, width: int) -> torch.Tensor:
    """[R, K] -> float32 [R, K/width], the largest magnitudes; NaN where a block holds one."""
    if x.dtype == torch.bfloat16:
        # The bit patterns of non-negative BF16 numbers are ordered as their values are, and NaN comes last.
        bits = x.view(torch.int16) & 0x7FFF
        return bits.view(len(x), x.shape[1] // width, width).amax(-1).view(torch.bfloat16).float()
    return x.abs().view(len(x), x.shape[1] // width, width).amax(-1)


def _group_amax(block_amax: torch.Tensor, spec: QuantizerSpec) -> torch.Tensor:
    """[R, blocks] -> [R, 1], or [1, 1] when all rows share a scale."""
    if spec.outer_domain not in _SHARED:
        return block_amax.amax(-1, keepdim=True)
    return block_amax.amax().view(1, 1) if len(block_amax) else block_amax.new_zeros(1, 1)


def _codes(
    x: torch.Tensor, block_amax: torch.Tensor, outer: OuterScales, spec: QuantizerSpec, seed: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes [R, K or K/2] and block-scale bytes (None without blocks)."""
    if spec.block is Block.NONE:
        return _encode_elements(x, None, None, outer, spec, seed), None
    stored, scale = block_scales(block_amax, outer, spec)
    codes = _encode_elements(
        x, _per_row(stored, spec, len(x)), _per_row(scale, spec, len(x)), outer, spec, seed
    )
    if spec.selector is Selector.LARGEST:
        return codes, stored
    stored_4, scale_4 = block_scales(block_amax, outer, spec, expansion=1.5)
    codes_4 = _encode_elements(
        x, _per_row(stored_4, spec, len(x)), _per_row(scale_4, spec, len(x)), outer, spec, seed
    )
    errors = [_block_error(x, c, s, outer, spec) for c, s in ((codes, scale), (codes_4, scale_4))]
    four = errors[1] < errors[0]
    pick = _per_row(four, spec, len(x)).repeat_interleave(_BLOCK_WIDTH[spec.block] // 2, dim=-1)
    return torch.where(pick, codes_4, codes), torch.where(four, stored_4, stored)


def _encode_elements(
    x: torch.Tensor,
    stored: torch.Tensor | None,
    scale: torch.Tensor | None,
    outer: OuterScales,
    spec: QuantizerSpec,
    seed: int | None,
) -> torch.Tensor:
    """[R, K] with its block scales [R, blocks] -> codes in the spec's layout."""
    rows, width = x.shape
    element = ELEMENTS[spec.element]
    zero = None if stored is None else stored == 0
    clears = spec.underflow_codes is UnderflowCodes.ZERO_IF_BYTE_ZERO
    if clears and scale is not None and zero is not None:
        scale = scale.masked_fill(zero, 1.0)  # keeps 0/0 out; the codes of these blocks are cleared below
    step = element_step(scale, outer, spec).rows(rows)
    if spec.underflow_codes is UnderflowCodes.ZERO_FACTOR_IF_BYTE_ZERO and zero is not None:
        step = step.zero_where(zero)
    elif spec.underflow_codes is UnderflowCodes.ZERO_FACTOR_IF_AMAX_ZERO:
        step = step.zero_where(_block_amax(x, _BLOCK_WIDTH[spec.block]) == 0)
    noise = None
    if spec.rounding is Rounding.STOCHASTIC:
        assert seed is not None
        generator = torch.Generator(x.device).manual_seed(seed)
        noise = torch.rand(x.shape, generator=generator, device=x.device)
    packed = spec.code_layout is CodeLayout.EVEN_LOW
    codes = torch.empty(rows, width // 2 if packed else width, dtype=torch.uint8, device=x.device)
    chunk = max(1, (_CHUNK_ELEMENTS_GPU if x.is_cuda else _CHUNK_ELEMENTS) // width)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        scaled = step.apply(x, part)
        if spec.non_finite is not NonFinite.REFUSE:
            scaled = scaled.nan_to_num(nan=element.max, posinf=FP32_MAX, neginf=-FP32_MAX)
        if spec.negative_zero is NegativeZero.POSITIVE:
            scaled = scaled + 0.0  # -0 + 0 = +0
        own = element.encode(scaled, None if noise is None else noise[part].view_as(scaled)).flatten(1)
        codes[part] = pack(own) if packed else own
    if clears and zero is not None:
        blocks = zero.shape[1]
        codes.view(rows, blocks, codes.shape[1] // blocks).masked_fill_(zero.unsqueeze(-1), 0)
    return codes


def _block_error(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, outer: OuterScales, spec: QuantizerSpec
) -> torch.Tensor:
    """float32, the shape of `scale`: error of each block's decoded values, absolute or squared, summed.

    ((q * s) * A) / M - x, as fouroversix and Transformer Engine compute it, which is not q * s * g to the last bit.
    """
    width = _BLOCK_WIDTH[spec.block]
    decoded = decode_packed(codes).float().view(len(x), x.shape[1] // width, width)
    decoded = decoded * _per_row(scale, spec, len(x)).unsqueeze(-1)
    decoded = decoded * outer.amax.unsqueeze(-1) / outer.amax.new_tensor(outer_divisor(spec))
    difference = decoded - x.float().view_as(decoded)
    error = (difference.abs() if spec.selector is Selector.FOUR_OVER_SIX_MAE else difference.square()).sum(-1)
    if spec.block is Block.TILE_16:
        error = (
            torch.nn.functional.pad(error, (0, 0, 0, -len(x) % TILE)).view(-1, TILE, error.shape[-1]).sum(1)
        )
    return error


def _decode_block_scales(stored: torch.Tensor, spec: QuantizerSpec, dtype: torch.dtype) -> torch.Tensor:
    codec = codec_e4m3 if spec.block_scale_format is BlockScaleFormat.E4M3 else codec_e8m0
    return codec.decode(stored, dtype)


def _per_row(per_block: torch.Tensor, spec: QuantizerSpec, rows: int) -> torch.Tensor:
    """[..., block rows, blocks] -> [..., R, blocks]."""
    if spec.block is not Block.TILE_16:
        return per_block
    return per_block.repeat_interleave(TILE, dim=-2)[..., :rows, :]


def _join(
    parts: list[QuantizedTensor], join: Callable[[list[torch.Tensor]], torch.Tensor]
) -> QuantizedTensor:
    """`torch.cat` (rows of one matrix) or `torch.stack` (experts) of every tensor that the parts have."""

    def joined(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return join(present) if present else None

    return QuantizedTensor(
        join([part.codes for part in parts]),
        joined([part.block_scales for part in parts]),
        joined([part.outer_scales for part in parts]),
    )


def _refuse_non_finite(
    x: torch.Tensor, block_amax: torch.Tensor, what: str, on_non_finite: NonFiniteReport | None
) -> None:
    finite = torch.isfinite(block_amax)
    if on_non_finite is not None:
        on_non_finite(~finite.all(-1))
    elif not finite.all():
        nan, inf = int(x.isnan().sum()), int(x.isinf().sum())
        raise ValueError(
            f"cannot quantise {what} {tuple(x.shape)}: {nan} NaN and {inf} infinite values among {x.numel()}"
        )

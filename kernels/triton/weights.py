"""Expert weights quantised and packed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.quantize import QuantizedTensor
from kernels.quantizer_spec import QuantizerSpec, ScaleDomain
from kernels.triton.operand import BLOCK
from kernels.triton.quantize import launch_rows
from kernels.triton.support import check_quantizer, check_rows, words

_WORDS_AT_ONCE = 8192


def quantize_weight(weight: torch.Tensor, spec: QuantizerSpec, *, halves: bool = False) -> QuantizedTensor:
    """As `kernels.quantize.quantize_weight`: bfloat16 or float32 [E, N, K] -> quantised experts, scales in their
    logical order. outer_scales: [E, N] under `row`, [E, 1] under `expert`.

    halves: N holds gate rows, then as many up rows; under these domains that changes nothing. Waits for the device, to
    find values that are not finite. Raises ValueError for these, for specs other than `minite`'s and
    `minite_expert`'s, for another shape or type, and for E = 0.
    """
    quantized, bad = quantize_and_flag(weight, spec)
    _refuse(weight, bad)
    return quantized


def quantize_and_flag(weight: torch.Tensor, spec: QuantizerSpec) -> tuple[QuantizedTensor, torch.Tensor]:
    """As `quantize_weight` without waiting for the device; and bool [E, N], whether the outer group of that feature
    holds values that are not finite.
    """
    check_quantizer(spec, (ScaleDomain.ROW, ScaleDomain.EXPERT))
    if weight.dim() != 3 or len(weight) == 0:
        raise ValueError(f"a weight must be [E, N, K] with E >= 1, got {tuple(weight.shape)}")
    experts, features, width = weight.shape
    rows = weight.detach().reshape(experts * features, width)
    check_rows(rows, "weight")
    shared = spec.outer_domain is ScaleDomain.EXPERT
    codes = torch.empty(len(rows), width // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(rows), width // BLOCK, dtype=torch.uint8, device=weight.device)
    outer = torch.empty(experts, 1 if shared else features, dtype=torch.float32, device=weight.device)
    bad = torch.empty(len(rows), dtype=torch.uint8, device=weight.device)
    if shared:
        amax = torch.zeros(experts, dtype=torch.int32, device=weight.device)
        _launch_amax(rows, amax)
        launch_rows(rows, codes, scales, outer, bad, amax=amax, rows_of_group=features)
    else:
        launch_rows(rows, codes, scales, outer, bad)
    quantized = QuantizedTensor(codes.view(experts, features, -1), scales.view(experts, features, -1), outer)
    return quantized, bad.view(torch.bool).view(experts, features)


def _refuse(weight: torch.Tensor, bad: torch.Tensor) -> None:
    if not bool(bad.any()):
        return
    expert = int(bad.any(1).nonzero()[0, 0])
    own = weight[expert]
    nan, inf = int(own.isnan().sum()), int(own.isinf().sum())
    raise ValueError(
        f"cannot quantise weight of expert {expert} {tuple(own.shape)}: {nan} NaN and {inf} infinite values"
        f" among {own.numel()}"
    )


def _launch_amax(rows: torch.Tensor, amax: torch.Tensor) -> None:
    """int32 amax [experts] becomes the FP32 bits of each expert's largest magnitude; it must hold zeros."""
    flat = words(rows).view(len(amax), -1)
    if flat.numel():
        _amax[(triton.cdiv(flat.shape[1], _WORDS_AT_ONCE), len(amax))](
            flat,
            amax,
            flat.shape[1],
            WORDS=_WORDS_AT_ONCE,
            BF16=rows.dtype is torch.bfloat16,
            num_warps=8,
        )


@triton.jit
def _amax(x, amax, count, WORDS: tl.constexpr, BF16: tl.constexpr):
    """Some words of one expert. NaN counts as larger than infinity."""
    expert = tl.program_id(1)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    found = tl.load(x + expert.to(tl.int64) * count + word, mask=word < count, other=0)
    found = found.to(tl.uint32, bitcast=True)
    if BF16:
        bits = tl.maximum(found & 0x7FFF0000, (found << 16) & 0x7FFF0000)
    else:
        bits = found & 0x7FFFFFFF
    tl.atomic_max(amax + expert, tl.max(bits.to(tl.int32, bitcast=True), axis=0))

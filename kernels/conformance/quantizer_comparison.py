"""An activation quantiser's bytes against those of the oracle, and against bytes of the same quantiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kernels.conformance import oracle
from kernels.conformance.check import Bench, Mismatch, NotApplicable, as_array, expect_equal
from kernels.conformance.oracle import Expected
from kernels.quantize import QuantizedTensor
from kernels.quantizer_spec import Block, BlockScaleFormat, CodeLayout, QuantizerSpec, ScaleDomain

PARTS = ("outer scales", "block scales", "codes")


def quantizer(bench: Bench) -> QuantizerSpec:
    if bench.spec.activation is None:
        raise NotApplicable("activation=none")
    if bench.subject.quantize_activation is None:
        raise NotApplicable(f"{bench.subject.name} has no activation quantiser")
    return bench.spec.activation


def run(bench: Bench, x: np.ndarray | torch.Tensor) -> QuantizedTensor:
    assert bench.subject.quantize_activation is not None
    return bench.subject.quantize_activation(to_tensor(bench, x))


def to_tensor(bench: Bench, x: np.ndarray | torch.Tensor) -> torch.Tensor:
    """BF16 on the subject's device; a tensor is taken as it is."""
    if isinstance(x, torch.Tensor):
        return x.to(bench.subject.device)
    return torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16).to(bench.subject.device)


def expected(x: np.ndarray, spec: QuantizerSpec) -> Expected:
    try:
        return oracle.quantize(x, spec)
    except oracle.Undetermined as reason:
        raise NotApplicable(str(reason)) from reason


def compare(
    what: str, wanted: Expected, found: QuantizedTensor, spec: QuantizerSpec, parts: Iterable[str] = PARTS
) -> None:
    """Raises Mismatch at the first differing element, of outer scales first, then block scales, then codes."""
    parts = tuple(parts)
    codes = element_codes(found, spec)
    if "outer scales" in parts:
        _compare_optional(f"{what}: outer scales", wanted.stored_outer(spec), found.outer_scales)
    wanted = _settle(wanted, codes, found, spec)
    if "block scales" in parts:
        scales = None if found.block_scales is None else as_array(found.block_scales)
        if scales is not None and spec.block_scale_format is BlockScaleFormat.E4M3:
            scales = np.where(scales == oracle.SCALE_NAN + 128, oracle.SCALE_NAN, scales)  # a NaN has no sign
        _compare_optional(
            f"{what}: block scales",
            wanted.block_scales,
            scales,
            lambda byte: f"0x{byte:02x} ({oracle.decode_scales(np.array(byte), spec):g})",
        )
    if "codes" in parts:
        if codes.shape == wanted.codes.shape:
            codes = np.where(wanted.undefined, wanted.codes, codes)
        expect_equal(
            f"{what}: codes",
            wanted.codes,
            codes,
            lambda code: f"0x{code:x} ({oracle.decode_codes(np.array(code), spec):g})",
        )


def element_codes(found: QuantizedTensor, spec: QuantizerSpec) -> np.ndarray:
    """uint8 [R, K], one code per element, as its place in memory says."""
    stored = as_array(found.codes)
    if stored.dtype != np.uint8:
        raise Mismatch(f"codes: expected uint8, found {stored.dtype}")
    if spec.code_layout is CodeLayout.BYTE:
        return stored
    return np.stack([stored % 16, stored // 16], -1).reshape(*stored.shape[:-1], -1)


def _compare_optional(
    what: str,
    wanted: np.ndarray | None,
    found: torch.Tensor | np.ndarray | None,
    show: Callable[[Any], str] = str,
) -> None:
    if wanted is None or found is None:
        if (wanted is None) is not (found is None):
            raise Mismatch(f"{what}: expected {'none' if wanted is None else 'some'}, found the opposite")
        return
    expect_equal(what, wanted, found, show)


def _settle(wanted: Expected, codes: np.ndarray, found: QuantizedTensor, spec: QuantizerSpec) -> Expected:
    """Where the spec does not decide between the candidates of 4over6, the one that was taken."""
    if wanted.other is None or wanted.block_scales is None or found.block_scales is None:
        return wanted
    other, close = wanted.other
    scales = as_array(found.block_scales)
    if scales.shape != wanted.block_scales.shape or other.block_scales is None:
        return wanted
    takes = close & (scales == other.block_scales)
    if codes.shape != wanted.codes.shape:
        return wanted
    element = oracle.per_element(takes, spec, codes.shape)
    return replace(
        wanted,
        codes=np.where(element, other.codes, wanted.codes),
        block_scales=np.where(takes, other.block_scales, wanted.block_scales),
    )


def conform(bench: Bench, what: str, x: np.ndarray, parts: Iterable[str] = PARTS) -> None:
    spec = quantizer(bench)
    compare(what, expected(x, spec), run(bench, x), spec, parts)


def same(
    what: str, wanted: QuantizedTensor, found: QuantizedTensor, rows: slice | np.ndarray, spec: QuantizerSpec
) -> None:
    """Rows `rows` of `found` against all of `wanted`."""
    for name in ("outer_scales", "block_scales", "codes"):
        left, right = getattr(wanted, name), getattr(found, name)
        if (left is None) is not (right is None):
            raise Mismatch(f"{what}: {name} appear in one call only")
        if left is not None:
            shared = name == "outer_scales" and spec.outer_domain is ScaleDomain.TENSOR
            chosen = slice(None) if shared else rows
            if name == "block_scales" and spec.block is Block.TILE_16 and isinstance(rows, slice):
                chosen = slice(0, len(left))
            if isinstance(chosen, np.ndarray) and len(right) <= chosen.max():
                raise Mismatch(f"{what}: {name}: expected {len(chosen)} rows, found {len(right)}")
            expect_equal(f"{what}: {name}", as_array(left), as_array(right)[chosen])

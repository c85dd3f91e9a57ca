"""Checks of the weight quantiser, and of the gradient's where a spec has one."""

from __future__ import annotations

import numpy as np

from kernels.conformance import inputs, oracle
from kernels.conformance.check import Bench, NotApplicable, Suite, as_array, expect_equal
from kernels.conformance.oracle_layer import quantize_matrix
from kernels.conformance.quantizer_comparison import compare, to_tensor
from kernels.quantize import QuantizedTensor
from kernels.quantizer_spec import Block, QuantizerSpec, ScaleDomain

WEIGHT = Suite("weight")
GRADIENT = Suite("gradient")


def quantizer(bench: Bench) -> QuantizerSpec:
    if bench.spec.weight is None:
        raise NotApplicable("weight=none")
    if bench.subject.quantize_weight is None:
        raise NotApplicable(f"{bench.subject.name} has no weight quantiser")
    return bench.spec.weight


def run(bench: Bench, weight: np.ndarray, *, halves: bool) -> QuantizedTensor:
    assert bench.subject.quantize_weight is not None
    return bench.subject.quantize_weight(to_tensor(bench, weight), halves)


def conform(bench: Bench, what: str, weight: np.ndarray, *, halves: bool = False) -> None:
    """Every expert of float64 [E, N, K] against the oracle."""
    spec = quantizer(bench)
    found = run(bench, weight, halves=halves)
    for e, matrix in enumerate(weight):
        try:
            parts = quantize_matrix(matrix, spec, halves=halves)
        except oracle.Undetermined as reason:
            raise NotApplicable(str(reason)) from reason
        names = ("",) if len(parts) == 1 else (", gate rows", ", up rows")
        for name, part, own in zip(names, parts, _split(found, e, len(parts)), strict=True):
            compare(f"{what}: expert {e}{name}", part, own, spec)


def _split(found: QuantizedTensor, e: int, parts: int) -> list[QuantizedTensor]:
    """Expert e in `parts` parts, each held as activations are: [R, K] with outer scales [R, 1] or [1, 1]."""
    codes = found.codes[e].chunk(parts)
    scales = [None] * parts if found.block_scales is None else found.block_scales[e].chunk(parts)
    outer = [None] * parts if found.outer_scales is None else found.outer_scales[e][:, None].chunk(parts)
    return [QuantizedTensor(*part) for part in zip(codes, scales, outer, strict=True)]


def _experts(experts: int, rows: int, width: int, seed: int = 0) -> np.ndarray:
    return inputs.random(experts * rows, width, seed).reshape(experts, rows, width)


@WEIGHT.check("weight bytes")
def weight_bytes(bench: Bench) -> None:
    """Codes, block scales and outer scales of random experts."""
    conform(bench, "random", _experts(3, 64, 160))


@WEIGHT.check("heavy-tailed weights")
def heavy_tails(bench: Bench) -> None:
    """Features and blocks that differ by many binades."""
    weight = inputs.heavy_tailed(96, 160, seed=20).reshape(2, 48, 160)
    conform(bench, "heavy-tailed", weight)


@WEIGHT.check("gate and up")
def gate_and_up(bench: Bench) -> None:
    """Outer scales of halves that differ in size: shared, or one each, as the spec says."""
    weight = _experts(2, 64, 96, seed=21)
    weight[:, 32:] *= 2.0**-7
    conform(bench, "w13", weight, halves=True)
    conform(bench, "w2", weight, halves=False)


@WEIGHT.check("zero expert")
def zero_expert(bench: Bench) -> None:
    """An expert of zeros, and features of zeros in another."""
    weight = _experts(3, 32, 96, seed=22)
    weight[1] = 0
    weight[2, [0, 17]] = 0
    conform(bench, "with zeros", weight)


@WEIGHT.check("stacked against alone")
def stacked(bench: Bench) -> None:
    """An expert's bytes do not depend on the experts beside it."""
    quantizer(bench)
    weight = _experts(4, 32, 96, seed=23) * np.array([1, 2.0**6, 2.0**-6, 1])[:, None, None]
    together = run(bench, weight, halves=True)
    for e in range(4):
        alone = run(bench, weight[e : e + 1], halves=True)
        for name in ("outer_scales", "block_scales", "codes"):
            left, right = getattr(alone, name), getattr(together, name)
            if left is not None:
                expect_equal(f"expert {e}: {name}", as_array(left)[0], as_array(right)[e])


@WEIGHT.check("tail K of weights")
def tail_widths(bench: Bench) -> None:
    """Widths that are no multiple of a kernel's tile."""
    for width in inputs.tail_widths(quantizer(bench)):
        conform(bench, f"K={width}", _experts(2, 32, width, seed=width))


@WEIGHT.check("partial tiles")
def partial_tiles(bench: Bench) -> None:
    """Features that do not fill a 16x16 block."""
    if quantizer(bench).block is not Block.TILE_16:
        raise NotApplicable(f"block={quantizer(bench).block}")
    conform(bench, "40 features", _experts(2, 40, 96, seed=24))


@WEIGHT.check("feature swap")
def feature_swap(bench: Bench) -> None:
    """A feature's bytes do not depend on the features beside it."""
    spec = quantizer(bench)
    if spec.outer_domain in oracle.SHARED_DOMAINS or spec.block is Block.TILE_16:
        shared = f"outer_domain={spec.outer_domain}, block={spec.block}"
        raise NotApplicable(f"{shared}: features share scales")
    assert spec.outer_domain in (ScaleDomain.ROW, ScaleDomain.NONE)
    weight = _experts(1, 32, 96, seed=25)
    order = np.random.default_rng(4).permutation(32)
    first, second = run(bench, weight, halves=False), run(bench, weight[:, order], halves=False)
    for name in ("outer_scales", "block_scales", "codes"):
        left, right = getattr(first, name), getattr(second, name)
        if left is not None:
            expect_equal(f"permuted features: {name}", as_array(left)[:, order], as_array(right))


@GRADIENT.check("gradient bytes")
def gradient_bytes(bench: Bench) -> None:
    """All bytes of the quantiser of the gradient's operands."""
    spec = bench.spec.gradient
    if spec is None:
        raise NotApplicable("gradient=none")
    if bench.subject.quantize_gradient is None:
        raise NotApplicable(f"{bench.subject.name} has no gradient quantiser")
    for what, x in (("random", inputs.random(64, 160)), ("heavy-tailed", inputs.heavy_tailed(64, 160))):
        try:
            wanted = oracle.quantize(x, spec)
        except oracle.Undetermined as reason:
            raise NotApplicable(str(reason)) from reason
        compare(what, wanted, bench.subject.quantize_gradient(to_tensor(bench, x)), spec)

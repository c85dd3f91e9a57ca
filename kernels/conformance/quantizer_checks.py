"""Checks of the activation quantiser: bytes against the oracle, and bytes against bytes of the same quantiser."""

from __future__ import annotations

import numpy as np
import torch

from kernels.conformance import inputs, oracle
from kernels.conformance.check import Bench, Mismatch, NotApplicable, Suite, as_array, expect_equal
from kernels.conformance.quantizer_comparison import (
    compare,
    conform,
    expected,
    quantizer,
    run,
    same,
    to_tensor,
)
from kernels.quantizer_spec import Block, NonFinite, ScaleDomain

SUITE = Suite("activation")


@SUITE.check("outer scales")
def outer_scales(bench: Bench) -> None:
    """The stored outer quantity, for every BF16 significand as largest magnitude."""
    spec = quantizer(bench)
    if spec.outer_domain is ScaleDomain.NONE:
        raise NotApplicable("outer_domain=none")
    maxima = inputs.significands((0, -11, 30))
    if spec.outer_domain is ScaleDomain.TENSOR:
        maxima = maxima[::5]
    for x in inputs.separate(inputs.with_largest(maxima, 2 * inputs.block_width(spec)), spec):
        conform(bench, f"largest magnitude {np.abs(x).max():g}", x, ["outer scales"])


@SUITE.check("block scales")
def block_scales(bench: Bench) -> None:
    """Block scale bytes of random rows."""
    if quantizer(bench).block is Block.NONE:
        raise NotApplicable("block=none")
    conform(bench, "random rows", inputs.random(160, 320), ["block scales"])


@SUITE.check("element codes")
def element_code_values(bench: Bench) -> None:
    """Codes of random rows."""
    conform(bench, "random rows", inputs.random(160, 320), ["codes"])


@SUITE.check("heavy-tailed rows")
def heavy_tails(bench: Bench) -> None:
    """All bytes of rows whose blocks differ by many binades."""
    conform(bench, "heavy-tailed rows", inputs.heavy_tailed(96, 320))


@SUITE.check("element midpoints")
def element_midpoints(bench: Bench) -> None:
    """Ties between two codes go to the even one; a BF16 step beside them does not."""
    conform(bench, "midpoints", inputs.element_midpoints(quantizer(bench)))


@SUITE.check("scale midpoints")
def scale_midpoints(bench: Bench) -> None:
    """Block maxima halfway between two scales, and a BF16 step beside it."""
    spec = quantizer(bench)
    if spec.block is Block.NONE:
        raise NotApplicable("block=none")
    conform(bench, "scale midpoints", inputs.largest_in_block(inputs.scale_midpoints(spec), spec))


@SUITE.check("every block scale")
def every_scale(bench: Bench) -> None:
    """Blocks that ask for each finite positive scale of the format."""
    spec = quantizer(bench)
    if spec.block is Block.NONE:
        raise NotApplicable("block=none")
    conform(bench, "blocks of every scale", inputs.largest_in_block(inputs.scale_maxima(spec), spec))


@SUITE.check("every significand")
def every_significand(bench: Bench) -> None:
    """Block maxima of every BF16 significand: scales rounded down saturate the largest element."""
    spec = quantizer(bench)
    conform(bench, "block maxima", inputs.largest_in_block(inputs.significands((0, -5)), spec))


@SUITE.check("subnormal scales")
def subnormal_scales(bench: Bench) -> None:
    """Blocks up to 2^-24 below the largest one: subnormal scales, and scales that underflow to zero."""
    spec = quantizer(bench)
    if spec.block is Block.NONE:
        raise NotApplicable("block=none")
    largest = oracle.VALUES[spec.element][-1] * (spec.block_scale_max or 1)
    maxima = np.concatenate([largest * np.ldexp(1 + i / 8, np.arange(-24, -12)) for i in range(8)])
    conform(bench, "small blocks", inputs.largest_in_block(maxima, spec))


@SUITE.check("zero blocks")
def zero_blocks(bench: Bench) -> None:
    """Bytes of blocks of zeros in rows that have others."""
    spec = quantizer(bench)
    width = inputs.block_width(spec)
    x = inputs.random(32, 8 * width, seed=3)
    x[:, width : 3 * width] = 0
    x[5, -width:] = 0
    conform(bench, "zero blocks", x)


@SUITE.check("zero rows")
def zero_rows(bench: Bench) -> None:
    """Bytes of rows of zeros: outer scale, block scales, codes."""
    spec = quantizer(bench)
    x = inputs.random(32, 96, seed=4)
    x[[0, 7, 31]] = 0
    conform(bench, "rows of zeros among others", x)
    conform(bench, "rows of zeros only", np.zeros((16, 96)))
    if spec.outer_domain is ScaleDomain.TOKEN:
        conform(bench, "a row of zeros", np.zeros((1, 96)))


@SUITE.check("minus zero")
def minus_zero(bench: Bench) -> None:
    """The sign of -0 and of negative elements that round to zero."""
    width = inputs.block_width(quantizer(bench))
    x = inputs.random(16, 4 * width, seed=5)
    x[:, ::3] = -0.0
    x[:, 1::5] = -1e-6
    x[:, 2::7] = 1e-6
    x[:, -width:] = -0.0
    conform(bench, "minus zero", x)


@SUITE.check("huge rows")
def huge_rows(bench: Bench) -> None:
    """Largest magnitudes up to the largest BF16 number."""
    spec = quantizer(bench)
    maxima = np.array([2.0**e for e in (60, 100, 120, 125, 126, 127)] + [inputs.BF16_LARGEST])
    for x in inputs.separate(inputs.with_largest(maxima, 96), spec):
        conform(bench, f"largest magnitude {np.abs(x).max():g}", x)


@SUITE.check("tiny rows")
def tiny_rows(bench: Bench) -> None:
    """Largest magnitudes down to the smallest subnormal BF16 number, and around 2^-100 and 1e-8."""
    spec = quantizer(bench)
    around = np.concatenate([inputs.neighbours(np.array([2.0**-100, 2.0**-117, 2.0**-120])), [1e-8, 2e-8]])
    maxima = np.concatenate([around, [2.0**e for e in (-40, -80, -110, -126, -130, -133)]])
    for x in inputs.separate(inputs.with_largest(inputs.bf16(maxima), 96), spec):
        conform(bench, f"largest magnitude {np.abs(x).max():g}", x)


@SUITE.check("NaN and infinity")
def non_finite(bench: Bench) -> None:
    """Refused, or coded as the spec says."""
    spec = quantizer(bench)
    for value in (np.nan, np.inf, -np.inf):
        x = inputs.random(4, 96, seed=6)
        x[2, 37] = value
        if spec.non_finite is not NonFinite.REFUSE:
            conform(bench, f"{value} at [2, 37]", x)
            continue
        try:
            run(bench, x)
        except bench.subject.refuses:
            continue
        raise Mismatch(f"x[2, 37]={value}: expected to be refused, found codes")


@SUITE.check("packed layout")
def packed_layout(bench: Bench) -> None:
    """Each element's code stands in its own byte or nibble."""
    spec = quantizer(bench)
    x = inputs.one_element(4 * inputs.block_width(spec))
    conform(bench, "one element a row", x, ["codes"])
    stored, wanted = as_array(run(bench, x).codes), expected(x, spec).stored_codes(spec)
    expect_equal("bytes", wanted, stored, lambda byte: f"0x{int(byte):02x}")


@SUITE.check("scale order")
def scale_order(bench: Bench) -> None:
    """Block scales in memory, linear or swizzled, with zeros as padding."""
    spec = quantizer(bench)
    if spec.block is Block.NONE:
        raise NotApplicable("block=none")
    if bench.subject.stored_scales is None:
        raise NotApplicable(f"{bench.subject.name} gives no stored order")
    for rows, blocks in ((200, 5), (33, 4), (128, 8), (1, 1)):
        x = inputs.heavy_tailed(rows, blocks * inputs.block_width(spec), seed=rows)
        found = run(bench, x)
        compare(f"{rows} rows", expected(x, spec), found, spec, ["block scales"])
        assert found.block_scales is not None
        wanted = oracle.stored_scales(as_array(found.block_scales), spec, rows)
        stored = bench.subject.stored_scales(found)
        expect_equal(f"{rows} rows, {blocks} blocks: stored scales ({spec.scale_layout})", wanted, stored)


@SUITE.check("one row")
def one_row(bench: Bench) -> None:
    """A batch of one row."""
    conform(bench, "one row", inputs.random(1, 320, seed=8))


@SUITE.check("no rows")
def no_rows(bench: Bench) -> None:
    """A batch without rows has bytes of the right shapes."""
    spec = quantizer(bench)
    if bench.subject.forward is None:
        raise NotApplicable("only back ends are given empty batches")
    found = run(bench, np.zeros((0, 96)))
    expect_equal(
        "codes' shape",
        np.array(expected(np.zeros((0, 96)), spec).stored_codes(spec).shape),
        found.codes.shape,
    )


@SUITE.check("unaligned rows")
def unaligned_rows(bench: Bench) -> None:
    """Row counts around a multiple of 128."""
    for rows in (2, 31, 127, 128, 129):
        conform(bench, f"{rows} rows", inputs.random(rows, 96, seed=rows))


@SUITE.check("tail K")
def tail_widths(bench: Bench) -> None:
    """Widths that are no multiple of a kernel's tile."""
    for width in inputs.tail_widths(quantizer(bench)):
        conform(bench, f"K={width}", inputs.random(24, width, seed=width))


@SUITE.check("padded against unpadded")
def padded(bench: Bench) -> None:
    """Rows of zeros behind the others change no byte of these."""
    spec = quantizer(bench)
    x = inputs.random(77, 160, seed=9)
    longer = np.concatenate([x, np.zeros((128 - 77, 160))])
    same("padded", run(bench, x), run(bench, longer), slice(0, 77), spec)


@SUITE.check("permuted against unpermuted")
def permuted(bench: Bench) -> None:
    """Rows in another order have the same bytes, in that order."""
    spec = quantizer(bench)
    if spec.block is Block.TILE_16:
        raise NotApplicable(inputs.shares_rows(spec))
    x = inputs.heavy_tailed(75, 160, seed=10)
    order = np.random.default_rng(1).permutation(75)
    same("permuted", run(bench, x[order]), run(bench, x), order, spec)


@SUITE.check("context swap")
def context_swap(bench: Bench) -> None:
    """A row's bytes do not depend on the rows beside it."""
    spec = quantizer(bench)
    if inputs.shares_rows(spec):
        raise NotApplicable(inputs.shares_rows(spec))
    x = inputs.random(12, 160, seed=11)
    alone = run(bench, x[5:6])
    for what, others in (("large", 1e4 * x), ("small", 1e-4 * x), ("zero", 0 * x)):
        beside = inputs.bf16(others)
        beside[9] = x[5]
        same(f"beside {what} rows", alone, run(bench, beside), slice(9, 10), spec)


@SUITE.check("fused against unfused")
def fused(bench: Bench) -> None:
    """Permute and quantise in one pass against the one after the other."""
    spec = quantizer(bench)
    if bench.subject.permute_quantize is None:
        raise NotApplicable(f"{bench.subject.name} has no fused permute and quantise")
    if inputs.shares_rows(spec):
        raise NotApplicable(inputs.shares_rows(spec))
    x = inputs.heavy_tailed(37, 160, seed=12)
    ids = np.random.default_rng(2).permuted(np.tile(np.arange(6), (37, 1)), axis=1)[:, :2]
    order = np.argsort(ids.ravel(), kind="stable") // 2
    tensor, experts = to_tensor(bench, x), torch.from_numpy(ids).to(bench.subject.device)
    found = bench.subject.permute_quantize(tensor, experts, 6)
    compare("grouped rows", expected(x[order], spec), found, spec)


@SUITE.check("views")
def views(bench: Bench) -> None:
    """Input that is a part or a transpose of a larger tensor."""
    spec = quantizer(bench)
    whole = to_tensor(bench, inputs.random(60, 200, seed=13))
    for what, view in (
        ("columns", whole[:, 3:99]),
        ("rows", whole[1::2, :96]),
        ("transpose", whole[:32, :48].T),
    ):
        same(what, run(bench, view.contiguous()), run(bench, view), slice(None), spec)


@SUITE.check("FP32 input")
def fp32_input(bench: Bench) -> None:
    """FP32 rows, whose significands are longer than BF16's."""
    spec = quantizer(bench)
    if bench.subject.forward is None:
        raise NotApplicable("adapters take BF16")
    x = np.random.default_rng(3).standard_normal((48, 160)).astype(np.float32)
    found = run(bench, torch.from_numpy(x))
    compare("FP32 rows", expected(x.astype(np.float64), spec), found, spec)


@SUITE.check("repeated calls")
def repeated(bench: Bench) -> None:
    """The same bytes again, and an input that was left as it was."""
    spec = quantizer(bench)
    x = to_tensor(bench, inputs.heavy_tailed(64, 320, seed=14))
    before = x.clone()
    first = run(bench, x)
    for _ in range(3):
        same("another call", first, run(bench, x), slice(None), spec)
    expect_equal("input", as_array(before), as_array(x))

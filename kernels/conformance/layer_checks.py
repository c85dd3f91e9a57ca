"""Checks of the whole layer: permute, quantise, FC1, SwiGLU, quantise, FC2, router coefficient, combine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernels.conformance import inputs, layer_inputs
from kernels.conformance.check import Bench, Mismatch, NotApplicable, Suite, as_array, expect_equal
from kernels.conformance.layer_inputs import Case, cancelling_case, lone, random_case
from kernels.conformance.oracle_layer import Undetermined, Value, expert_layer
from kernels.quantizer_spec import Block, NonFinite
from kernels.spec import Accumulation, Combine, Epilogue

SUITE = Suite("layer")


def run(bench: Bench, case: Case) -> np.ndarray:
    """The back end's output [T, H], float64."""
    if bench.subject.forward is None:
        raise NotApplicable(f"{bench.subject.name} has no layer")
    device = bench.subject.device
    return as_array(bench.subject.forward(*case.arguments(device), case.weights(bench.spec, device)))


def expected(bench: Bench, case: Case) -> Value:
    if bench.subject.forward is None:
        raise NotApplicable(f"{bench.subject.name} has no layer")
    try:
        return expert_layer(case.layer(bench.spec), bench.spec)
    except Undetermined as reason:
        raise NotApplicable(str(reason)) from reason


def conform(bench: Bench, what: str, case: Case) -> None:
    near(bench, f"{what}: output", expected(bench, case), run(bench, case))


def near(bench: Bench, what: str, wanted: Value, found: np.ndarray) -> None:
    """Bit for bit where the oracle has no slack, up to the sign of zero; else within it."""
    if not wanted.slack.any():
        expect_equal(what, wanted.value + 0.0, found + 0.0)
        return
    scale, open_by = np.abs(wanted.value).max(), wanted.slack.max()
    if open_by >= scale:
        raise NotApplicable("the order of sums, which the spec leaves open, decides the whole output")
    bench.bound(f"order of sums is open: within {open_by / scale:.1e} of the largest output")
    if found.shape != wanted.value.shape:
        raise Mismatch(f"{what}: expected shape {wanted.value.shape}, found {found.shape}")
    far = ~(np.abs(found - wanted.value) <= wanted.slack)
    if far.any():
        index = tuple(int(i) for i in np.argwhere(far)[0])
        place, limit = ", ".join(map(str, index)), wanted.slack[index]
        raise Mismatch(
            f"{what}[{place}]: expected {wanted.value[index]} within {limit:.2e}, found {found[index]}"
        )


def unit(bench: Bench) -> int:
    """Widths are multiples of this."""
    return max(16, bench.spec.width_multiple)


def _tile(bench: Bench) -> None:
    quantizer = bench.spec.activation
    if quantizer is not None and quantizer.block is Block.TILE_16:
        raise NotApplicable(inputs.shares_rows(quantizer))


@SUITE.check("layer output")
def output(bench: Bench) -> None:
    """The output of random tokens, experts and coefficients."""
    conform(bench, "random", random_case(24, 4 * unit(bench), 3 * unit(bench), 6, 2))


@SUITE.check("tail K of both products")
def tail_widths(bench: Bench) -> None:
    """Hidden and intermediate widths that are no multiple of a kernel's tile."""
    for hidden, ffn in ((3, 5), (7, 1), (1, 3)):
        case = random_case(9, hidden * unit(bench), ffn * unit(bench), 4, 2, seed=hidden)
        conform(bench, f"H={case.x.shape[1]}, F={case.w2.shape[2]}", case)


@SUITE.check("products of all codes")
def code_products(bench: Bench) -> None:
    """Every activation code times every weight code."""
    if bench.spec.activation is None or bench.spec.weight is None:
        raise NotApplicable("activation=none" if bench.spec.activation is None else "weight=none")
    conform(bench, "pairs of codes", layer_inputs.every_code(bench.spec))


@SUITE.check("all weight bytes")
def weight_bytes(bench: Bench) -> None:
    """Every element code and every block scale byte as a weight."""
    if bench.spec.weight is None:
        raise NotApplicable("weight=none")
    conform(bench, "bytes as weights", layer_inputs.every_weight_byte(bench.spec))


@SUITE.check("epilogue association")
def epilogue(bench: Bench) -> None:
    """Outer scales multiplied in the spec's order: products that lie on BF16 midpoints."""
    if bench.spec.epilogue is Epilogue.NONE:
        raise NotApplicable("epilogue=none")
    conform(bench, "midpoints", layer_inputs.midpoint_case(max(32, unit(bench))))


@SUITE.check("FC1 output cast")
def fc1_cast(bench: Bench) -> None:
    """FC1's output is rounded to its type before SwiGLU."""
    case = lone(random_case(48, 2 * unit(bench), unit(bench), 2, 1, seed=40))
    conform(bench, "one feature", replace(case, p=np.ones_like(case.p)))


@SUITE.check("SwiGLU")
def swiglu(bench: Bench) -> None:
    """silu(gate)*up and its cast, for gates from -100 to 100."""
    case = lone(random_case(64, 2 * unit(bench), unit(bench), 2, 1, seed=41))
    size = 2.0 ** (np.arange(64) % 8 - 4)
    case = replace(case, x=case.x * size[:, None], p=np.ones_like(case.p))
    for start in range(0, 64, 16):
        conform(bench, "gates of all sizes", case.tokens(slice(start, start + 16)))


@SUITE.check("router coefficient")
def router(bench: Bench) -> None:
    """Its type, what it multiplies, and the rounding of the product (FC2's output is cast before)."""
    for top_k in (1, 2):
        case = lone(random_case(24, 2 * unit(bench), unit(bench), 3, top_k, seed=42))
        conform(bench, f"one feature, k={top_k}", case)
    case = random_case(24, 2 * unit(bench), 2 * unit(bench), 3, 1, seed=43)
    conform(
        bench,
        "several features",
        replace(case, p=case.p * np.linspace(0.003, 1, 24)[:, None].astype(np.float32)),
    )


@SUITE.check("combine order")
def combine(bench: Bench) -> None:
    """Expert outputs that nearly cancel, summed in the spec's order with its roundings."""
    conform(bench, "four experts", cancelling_case(max(32, unit(bench))))


@SUITE.check("two experts that cancel")
def combine_two(bench: Bench) -> None:
    """p*y - p*y: what is left says whether products are rounded before they are added."""
    conform(bench, "two experts", cancelling_case(max(32, unit(bench)), top_k=2))


@SUITE.check("many experts a token")
def many_slots(bench: Bench) -> None:
    """Eight slots a token."""
    conform(bench, "k=8", random_case(12, 2 * unit(bench), 2 * unit(bench), 10, 8, seed=44))


@SUITE.check("empty experts")
def empty_experts(bench: Bench) -> None:
    """Experts without tokens: the first, the last, one between."""
    ids = np.random.default_rng(5).permuted(np.tile([1, 2, 4], (12, 1)), axis=1)[:, :2]
    conform(
        bench, "experts 0, 3 and 5 empty", random_case(12, 2 * unit(bench), 2 * unit(bench), 6, 2, ids=ids)
    )


@SUITE.check("one token")
def one_token(bench: Bench) -> None:
    """A batch of one."""
    conform(bench, "one token", random_case(1, 4 * unit(bench), 3 * unit(bench), 4, 2, seed=45))


@SUITE.check("no tokens")
def no_tokens(bench: Bench) -> None:
    """An empty batch gives an empty output of the right width."""
    case = random_case(2, 2 * unit(bench), unit(bench), 3, 2).tokens(slice(0, 0))
    expect_equal("shape", np.array([0, 2 * unit(bench)]), np.array(run(bench, case).shape))


@SUITE.check("unaligned groups")
def unaligned_groups(bench: Bench) -> None:
    """Groups of 1, 127, 128, 129 and 0 tokens."""
    ids = np.repeat(np.arange(4), (1, 127, 128, 129))[:, None]
    ids = np.random.default_rng(6).permutation(ids)
    conform(bench, "groups", random_case(len(ids), unit(bench), unit(bench), 5, 1, seed=46, ids=ids))


@SUITE.check("one expert for all")
def one_expert(bench: Bench) -> None:
    """Every slot of every token goes to the same expert."""
    ids = np.full((10, 2), 3)
    conform(bench, "expert 3", random_case(10, 2 * unit(bench), unit(bench), 4, 2, seed=47, ids=ids))


@SUITE.check("zero tokens")
def zero_tokens(bench: Bench) -> None:
    """Tokens of zeros among others, and a zero expert."""
    case = random_case(12, 2 * unit(bench), 2 * unit(bench), 4, 2, seed=48)
    case.x[[0, 5]] = 0
    case.w13[2] = 0
    case.w2[3] = 0
    conform(bench, "with zeros", case)


@SUITE.check("tokens of all sizes")
def sizes(bench: Bench) -> None:
    """Tokens from 2^-24 to 2^6."""
    case = random_case(16, 2 * unit(bench), 2 * unit(bench), 4, 2, seed=49)
    conform(bench, "sizes", replace(case, x=case.x * np.ldexp(1.0, np.arange(-24, 8, 2))[:, None]))


@SUITE.check("long K")
def long_width(bench: Bench) -> None:
    """FC2 over 33 times 32 elements whose sizes span 2^16: FP32 sums in different orders differ."""
    case = random_case(4, 32, 1056, 2, 1, seed=50)
    case = replace(case, w2=case.w2 * np.ldexp(1.0, -(np.arange(1056) // 32 % 16)))
    conform(bench, "F=1056", case)


@SUITE.check("order along K")
def order_along_width(bench: Bench) -> None:
    """1024 of 1056 products of FC2 cancel: the roundings of partial sums are what is left, in the spec's order."""
    if bench.spec.accumulation in (Accumulation.ANY_ORDER, Accumulation.GEMM):
        raise NotApplicable(f"accumulation={bench.spec.accumulation}: the order is open")
    case = random_case(4, 32, 1056, 2, 1, seed=58)
    for half in (case.w13[:, :1056], case.w13[:, 1056:]):
        half[:, 512:1024] = half[:, :512]
    w2 = case.w2 * np.ldexp(1.0, -(np.arange(1056) // 32 % 16))
    w2[:, :, 512:1024] = -w2[:, :, :512]
    w2[:, :, 1024:] *= 2.0**-12
    conform(bench, "F=1056", replace(case, w2=w2))


@SUITE.check("layer: context swap")
def context_swap(bench: Bench) -> None:
    """A token's output does not depend on the tokens beside it."""
    quantizer = bench.spec.activation
    if quantizer is not None and inputs.shares_rows(quantizer):
        raise NotApplicable(inputs.shares_rows(quantizer))
    case = random_case(20, 4 * unit(bench), 2 * unit(bench), 4, 2, seed=51)
    whole = run(bench, case)
    _agree(bench, case, "alone", slice(7, 8), whole)
    _agree(bench, case, "beside others", np.array([19, 7, 3]), whole)


@SUITE.check("layer: permuted tokens")
def permuted_tokens(bench: Bench) -> None:
    """Tokens in another order have the same outputs, in that order."""
    _tile(bench)
    case = random_case(20, 2 * unit(bench), 2 * unit(bench), 4, 2, seed=52)
    _agree(bench, case, "permuted", np.random.default_rng(7).permutation(20), run(bench, case))


@SUITE.check("layer: padded against unpadded")
def padded(bench: Bench) -> None:
    """Tokens of zeros behind the others change no output of these."""
    _tile(bench)
    case = random_case(32, 2 * unit(bench), 2 * unit(bench), 4, 2, seed=53)
    case.x[21:] = 0
    _agree(bench, case, "unpadded", slice(0, 21), run(bench, case))


@SUITE.check("experts renumbered")
def renumbered(bench: Bench) -> None:
    """Experts in another order, with ids that follow, give the same output."""
    if bench.spec.combine is Combine.EXPERT_ORDER:
        raise NotApplicable("combine=expert_order")
    case = random_case(16, 2 * unit(bench), 2 * unit(bench), 5, 3, seed=54)
    order = np.random.default_rng(8).permutation(5)
    moved = replace(case, w13=case.w13[order], w2=case.w2[order], ids=np.argsort(order)[case.ids])
    wanted = expected(bench, case)
    near(bench, "renumbered: output", Value(run(bench, case), 2 * wanted.slack), run(bench, moved))


@SUITE.check("layer: views")
def views(bench: Bench) -> None:
    """Tokens that are a part of a larger tensor."""
    case = random_case(12, 2 * unit(bench), unit(bench), 4, 2, seed=55)
    wanted = run(bench, case)
    assert bench.subject.forward is not None
    device = bench.subject.device
    x, ids, p = case.arguments(device)
    wide = x.new_zeros(24, x.shape[1] + 5)
    wide[::2, 3:-2] = x
    found = bench.subject.forward(wide[::2, 3:-2], ids, p, case.weights(bench.spec, device))
    near(bench, "view: output", Value(wanted, 2 * expected(bench, case).slack), as_array(found))


@SUITE.check("layer: repeated calls")
def repeated(bench: Bench) -> None:
    """The same bits again."""
    case = random_case(24, 4 * unit(bench), 2 * unit(bench), 5, 3, seed=56)
    first, slack = run(bench, case), expected(bench, case).slack
    for _ in range(3):
        near(bench, "another call: output", Value(first, 2 * slack), run(bench, case))


@SUITE.check("layer: NaN and infinity")
def non_finite(bench: Bench) -> None:
    """A token that is not finite is refused."""
    quantizer = bench.spec.activation
    if quantizer is None or quantizer.non_finite is not NonFinite.REFUSE:
        raise NotApplicable("activation=none" if quantizer is None else f"non_finite={quantizer.non_finite}")
    for value in (np.nan, np.inf):
        case = random_case(4, 2 * unit(bench), unit(bench), 3, 2, seed=57)
        case.x[1, 3] = value
        try:
            run(bench, case)
        except bench.subject.refuses:
            continue
        raise Mismatch(f"x[1, 3]={value}: expected to be refused, found an output")


def _agree(bench: Bench, case: Case, what: str, tokens: np.ndarray | slice, whole: np.ndarray) -> None:
    """The outputs of some tokens alone, against theirs in the whole batch."""
    slack = expected(bench, case).slack[tokens]
    near(bench, f"{what}: output", Value(whole[tokens], 2 * slack), run(bench, case.tokens(tokens)))

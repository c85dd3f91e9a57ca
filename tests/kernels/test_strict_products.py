"""Exact products, and the layers made of them, against integers of any size and FP64."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.model_spec import Products
from kernels.strict.attention import attention
from kernels.strict.fixed_point import (
    ACTIVATION_BITS,
    SEGMENT,
    WEIGHT_BITS,
    fixed_point,
    product,
)
from kernels.strict.linear import Weight, linear

EXACT, LIBRARY = Products.EXACT, Products.LIBRARY


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of magnitudes that differ by many powers of two, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-12, 5, shape, generator=generator).double().exp2()
    kept = torch.rand(shape, generator=generator) > 0.1
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * size * kept).to(dtype)


def rounded(row: list[float], bits: int) -> tuple[list[int], Fraction]:
    """The fixed-point row by its definition, in exact arithmetic."""
    exponent = next((e for e in range(-256, 300) if max(map(abs, row)) < Fraction(2) ** e), 0)
    scale = Fraction(2) ** (exponent - bits)
    return [round(Fraction(value) / scale) for value in row], scale  # `round` takes ties to even


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_the_rounded_sum_of_integers(dtype: torch.dtype) -> None:
    x, w = random(5, 70, dtype=dtype), random(4, 70, seed=1, dtype=dtype)
    x[3] = 0
    found = linear(x, w, Weight(), EXACT, torch.float32)
    for i, row in enumerate(x.double().tolist()):
        for j, column in enumerate(w.double().tolist()):
            (a, sa), (b, sb) = rounded(row, ACTIVATION_BITS), rounded(column, WEIGHT_BITS)
            exact = sum(p * q for p, q in zip(a, b, strict=True))
            assert abs(exact) <= 2**53
            assert (
                found[i, j].item() == torch.tensor(float(exact * sa * sb), dtype=torch.float64).float().item()
            )


def test_the_largest_sums_are_exact() -> None:
    """All elements of a segment at their limit, and one that an inexact sum would lose."""
    x = torch.full((1, SEGMENT), 1 - 2**-24)  # rounds to 2^21 times its scale, as nothing larger does
    w = x.clone()
    w[0, -1] = 2.0**-22
    integers = fixed_point(x, ACTIVATION_BITS).integers, fixed_point(w, WEIGHT_BITS).integers
    assert integers[0].max() == 2**ACTIVATION_BITS and integers[1].max() == 2**WEIGHT_BITS
    expected = (SEGMENT - 1) * 2 ** (ACTIVATION_BITS + WEIGHT_BITS) + 2**ACTIVATION_BITS
    assert int((integers[0] * integers[1]).sum()) == expected
    assert int(integers[0].flip(1) @ integers[1].flip(1).T) == expected < 2**53


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.sampled_from([1, 16, 100, SEGMENT, SEGMENT + 1, 2500]),
    begin=st.integers(0, 20),
    threads=st.sampled_from([1, 2]),
    behind=st.integers(0, 33),
)
def test_a_row_depends_on_nothing_else(rows: int, width: int, begin: int, threads: int, behind: int) -> None:
    x, w = random(64, width), random(37, width, seed=1)
    whole = linear(x, w, Weight(), EXACT)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        part = linear(x[begin : begin + rows].clone(), w, Weight(), EXACT)
        order = torch.randperm(64)
        other = linear(x[order], w, Weight(), EXACT)
        transposed = linear(x.T.contiguous().T, w.T.contiguous().T, Weight(), EXACT)
        padded = linear(F.pad(x, (0, behind)), F.pad(w, (0, behind)), Weight(), EXACT)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(part, whole[begin : begin + rows])
    assert torch.equal(other, whole[order])
    assert torch.equal(transposed, whole) and torch.equal(padded, whole)


def test_products_are_close_to_those_of_the_library() -> None:
    x, w = torch.randn(30, 1500), torch.randn(20, 1500)
    exact = x.double() @ w.double().T
    bound = 1500**0.5 * (x.abs().amax(1, keepdim=True) * 2**-21 + w.abs().amax(1) * 2**-21)
    assert ((linear(x, w, Weight(), EXACT) - exact).abs() < bound).all()
    assert torch.equal(linear(x, w, Weight(), LIBRARY), F.linear(x, w))


def test_what_is_not_finite_stays_so() -> None:
    x = torch.ones(3, 4)
    x[1, 2], x[2, 0] = torch.nan, torch.inf
    found = product(fixed_point(x, ACTIVATION_BITS), fixed_point(torch.ones(2, 4), WEIGHT_BITS))
    assert found[0].tolist() == [4.0, 4.0] and not found[1:].isfinite().any()


def test_a_weight_is_made_anew_when_it_changes() -> None:
    x, w, form = torch.randn(3, 8), torch.randn(5, 8), Weight()
    first = linear(x, w, form, EXACT)
    assert form.of(w) is form.of(w)
    w.mul_(2)
    assert torch.equal(linear(x, w, form, EXACT), 2 * first)
    w.data.mul_(2)  # unseen by the version
    assert torch.equal(linear(x, w, form, EXACT), 2 * first)
    form.changed()
    assert torch.equal(linear(x, w, form, EXACT), 4 * first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_product_are_the_library_s(dtype: torch.dtype) -> None:
    x, w = random(9, 20, dtype=dtype), random(7, 20, seed=1, dtype=dtype)
    seed = random(9, 7, seed=2, dtype=dtype)
    grads = []
    for rule in (EXACT, LIBRARY):
        operands = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        linear(*operands, Weight(), rule).backward(seed)
        grads.append([operand.grad for operand in operands])
    for ours, usual in zip(*grads, strict=True):
        assert torch.equal(ours, usual)
    with torch.no_grad():
        assert not linear(x, w, Weight(), EXACT).requires_grad
    only = w.clone().requires_grad_()
    linear(x, only, Weight(), EXACT).backward(seed)
    assert torch.equal(only.grad, grads[0][1])


B, L, HEADS, GROUPS, D = 3, 41, 6, 2, 32


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, L, HEADS, D), (B, L, GROUPS, D), (B, L, GROUPS, D)
    return tuple(torch.randn(shape, generator=generator).to(dtype) * 2 for shape in shapes)


def first(*positions: int) -> torch.Tensor:
    return torch.tensor(positions)


def test_attention_is_that_of_the_formula() -> None:
    q, k, v = tensors()
    found = attention(q, k, v, first(0, 0, 0), 0.3, EXACT)
    for group in range(GROUPS):
        heads = slice(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS)
        scores = torch.einsum("bqhd,bkd->bhqk", q[:, :, heads].double(), k[:, :, group].double()) * 0.3
        scores.masked_fill_(torch.ones(L, L).triu(1).bool(), -torch.inf)
        expected = torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1), v[:, :, group].double())
        assert (found[:, :, heads] - expected).abs().max() < 1e-4
    assert (attention(q, k, v, first(0, 0, 0), 0.3, LIBRARY) - found).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_does_not_depend_on_cutting_and_padding(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype)
    whole = attention(q, k, v, first(0, 0, 0), 0.3, EXACT)
    padding = torch.full((B, 87, GROUPS, D), 1e30, dtype=dtype)
    for begin, end in ((0, 1), (0, 17), (5, 6), (16, 33), (40, 41)):
        keys, values = (torch.cat((x[:, :end], padding), 1) for x in (k, v))
        part = attention(q[:, begin:end], keys, values, first(begin, begin, begin), 0.3, EXACT)
        assert torch.equal(part, whole[:, begin:end])
    # Sequences of different lengths in one call, as when they are decoded.
    ends = [3, 41, 20]
    one = torch.stack([q[row, end - 1 : end] for row, end in enumerate(ends)])
    found = attention(one, k, v, first(*(end - 1 for end in ends)), 0.3, EXACT)
    for row, end in enumerate(ends):
        assert torch.equal(found[row, 0], whole[row, end - 1])


def test_attention_over_more_keys_than_a_segment() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, SEGMENT + 300, 1, 16, generator=generator) for _ in range(2))
    q = torch.randn(1, 5, 2, 16, generator=generator)
    start = SEGMENT + 290
    found = attention(q, k, v, first(start), 0.25, EXACT)
    exact = attention(q.double(), k.double(), v.double(), first(start), 0.25, LIBRARY)
    assert (found - exact).abs().max() < 1e-5
    alone = attention(q[:, 2:3], k[:, : start + 3], v[:, : start + 3], first(start + 2), 0.25, EXACT)
    assert torch.equal(alone[0, 0], found[0, 2])


def test_gradients_of_attention_are_the_library_s() -> None:
    grads = []
    for rule in (EXACT, LIBRARY):
        operands = [x.clone().requires_grad_() for x in tensors()]
        attention(*operands, first(0, 0, 0), 0.3, rule).backward(tensors()[0])
        grads.append([operand.grad for operand in operands])
    for ours, usual in zip(*grads, strict=True):
        assert torch.equal(ours, usual)

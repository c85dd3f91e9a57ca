"""The weighted sum over a token's slots."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_oracle import nearest_float32

from kernels.catalogue import named_spec
from kernels.combine import combine, fma, sum_slots
from kernels.routing import Routing
from kernels.spec import FloatType


def grouped(slots: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, Routing]:
    """[T, k, N] and its experts -> what `combine` takes."""
    routing = Routing.group(ids, int(ids.max()) + 1)
    return slots.flatten(0, 1)[routing.order], routing


def test_the_sum_runs_in_slot_order() -> None:
    slots = torch.tensor([1e8, 1.0, -1e8]).view(1, 3, 1).expand(5, 3, 100)
    assert (sum_slots(slots) == 0).all()
    assert (sum_slots(slots[:, [0, 2, 1]]) == 1).all()


def test_a_bf16_sum_is_rounded_at_every_addition() -> None:
    slots = torch.tensor([1.0, 2.0**-9, 2.0**-9]).view(1, 3, 1)  # half a unit in the last place, twice
    assert sum_slots(slots).item() == 1 + 2.0**-8
    assert sum_slots(slots, FloatType.BF16).item() == 1
    assert sum_slots(torch.tensor([1 + 2.0**-9]).view(1, 1, 1), FloatType.BF16).item() == 1


def test_product_and_sum_are_rounded_apart_or_fused() -> None:
    """A fused multiply-add keeps the 2^-24 that the product's rounding drops."""
    value = 1 + 2.0**-12
    slots = torch.tensor([-(1 + 2.0**-11), value]).view(1, 2, 1).expand(3, 2, 100)
    rows, routing = grouped(slots, torch.tensor([[1, 0]]).expand(3, 2))
    coefficients = torch.tensor([1.0, value]).expand(3, 2)
    changes = {"fc2_output": "fp32", "output": "fp32"}
    apart, fused = (
        combine(rows, routing, coefficients, named_spec("minite", {"combine": order, **changes}))
        for order in ("slot_order", "slot_order_fma")
    )
    assert (apart == 0).all() and (fused == 2.0**-24).all()


def test_expert_order_is_that_of_the_ids() -> None:
    slots = torch.tensor([1e8, 1.0, -1e8]).view(1, 3, 1)
    changes = {"fc2_output": "fp32", "output": "fp32", "combine": "expert_order"}
    spec = named_spec("minite", changes)
    for ids, expected in (
        ([0, 1, 2], 0.0),
        ([0, 2, 1], 1.0),
        ([4, 7, 1], 1.0),
        ([4, 0, 1], 0.0),
        ([2, 9, 5], 1.0),
    ):
        rows, routing = grouped(slots, torch.tensor([ids]))
        assert combine(rows, routing, torch.ones(1, 3), spec).item() == expected


def test_weighted_sum_equals_numpy_in_float32() -> None:
    torch.manual_seed(0)
    slots, coefficients = torch.randn(9, 4, 33).bfloat16(), torch.rand(9, 4)
    rows, routing = grouped(slots, torch.rand(9, 6).argsort(1)[:, :4])
    y, p = slots.float().numpy(), coefficients.numpy()
    expected = np.zeros((9, 33), np.float32)
    for j in range(4):
        expected = expected + p[:, j, None] * y[:, j]
    actual = combine(rows, routing, coefficients, named_spec("minite", {"output": "fp32"}))
    np.testing.assert_array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("position", ["swiglu_output", "swiglu_before_cast"])
def test_coefficients_that_were_multiplied_ahead_of_fc2_are_not_multiplied_again(position: str) -> None:
    slots = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows, routing = grouped(slots, torch.tensor([[0, 1]] * 4))
    spec = named_spec("minite", {"router_position": position, "output": "fp32"})
    assert torch.equal(combine(rows, routing, torch.zeros(4, 2), spec), sum_slots(slots))


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=1, max_size=40))
def test_fma_rounds_the_exact_value_once(cases: list[tuple[float, float, float]]) -> None:
    check_fma(*torch.tensor(cases, dtype=torch.float32).T)


def test_fma_where_two_roundings_would_be_wrong() -> None:
    """Exact values just beside the middle of two float32 numbers, closer than FP64 can tell."""
    g = torch.Generator().manual_seed(0)
    c = (1 + torch.randint(0, 2**23, (2000,), generator=g) * 2.0**-23).float()
    half = torch.full((2000,), 2.0**-24)  # half a unit in the last place of c
    tiny = torch.randint(-3, 4, (2000,), generator=g) * 2.0**-30
    # (2^-24 - t 2^-40) * (1 + t 2^-16) = 2^-24 - t^2 2^-56
    a, b = half - tiny * 2.0**-10, (1 + tiny * 2.0**14).float()
    check_fma(a, b, c)
    twice = (a.double() * b.double() + c.double()).float()
    assert (fma(a, b, c) != twice).any()


def test_fma_keeps_what_is_not_finite_and_subnormal_results() -> None:
    inf, tiny = float("inf"), 2.0**-149
    a, b, c = torch.tensor([[inf, 1, -inf], [1, 1, inf], [0, inf, 1], [tiny, 0.5, tiny], [tiny, 0.5, 0]]).T
    result = fma(a, b, c)
    assert result[0].isnan() and result[1] == inf and result[2].isnan()
    assert result[3:].tolist() == [2 * tiny, 0.0]  # ties to even


def check_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    for x, y, z, actual in zip(*(t.tolist() for t in (a, b, c, fma(a, b, c))), strict=True):
        assert actual == nearest_float32(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)

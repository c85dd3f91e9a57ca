"""Grouping of token slots by expert, and the ordered sum over slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.routing import Routing, sum_in_slot_order


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_groups_hold_the_slots_of_their_expert_in_order(
    tokens: int, top_k: int, experts: int, random
) -> None:
    ids = [[random.randrange(experts) for _ in range(top_k)] for _ in range(tokens)]
    routing = Routing.group(torch.tensor(ids, dtype=torch.int64).view(tokens, top_k), experts)
    slots = [(t, j) for t in range(tokens) for j in range(top_k)]
    assert len(routing.offsets) == experts + 1
    for expert, (start, end) in enumerate(zip(routing.offsets, routing.offsets[1:], strict=False)):
        expected = [(t, j) for t, j in slots if ids[t][j] == expert]
        assert [divmod(slot, top_k) for slot in routing.order[start:end].tolist()] == expected
        assert routing.tokens[start:end].tolist() == [t for t, _ in expected]
    assert [expert for expert, _ in routing.occupied()] == sorted({e for row in ids for e in row})


def test_by_token_undoes_the_grouping() -> None:
    ids = torch.tensor([[2, 0], [0, 2], [2, 2]])
    routing = Routing.group(ids, 4)
    slots = torch.arange(12.0).view(3, 2, 2)
    assert torch.equal(routing.by_token(slots.flatten(0, 1)[routing.order]), slots)


@pytest.mark.parametrize("bad", [-1, 4])
def test_ids_of_no_expert_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 4\)"):
        Routing.group(torch.tensor([[0, bad]]), 4)


def test_the_sum_runs_in_slot_order() -> None:
    slots = torch.tensor([1e8, 1.0, -1e8]).view(1, 3, 1).expand(5, 3, 100)
    assert (sum_in_slot_order(slots) == 0).all()
    assert (sum_in_slot_order(slots[:, [0, 2, 1]]) == 1).all()


def test_product_and_sum_are_rounded_apart() -> None:
    """A fused multiply-add would keep the 2^-24 that the product's rounding drops."""
    value = 1 + 2.0**-12
    slots = torch.tensor([-(1 + 2.0**-11), value]).view(1, 2, 1).expand(3, 2, 100)
    coefficients = torch.tensor([1.0, value]).expand(3, 2)
    assert (sum_in_slot_order(slots, coefficients) == 0).all()


def test_weighted_sum_equals_numpy_in_float32() -> None:
    torch.manual_seed(0)
    slots, coefficients = torch.randn(9, 4, 33).bfloat16(), torch.rand(9, 4)
    y, p = slots.float().numpy(), coefficients.numpy()
    expected = np.zeros((9, 33), np.float32)
    for j in range(4):
        expected = expected + p[:, j, None] * y[:, j]
    np.testing.assert_array_equal(sum_in_slot_order(slots, coefficients).numpy(), expected)

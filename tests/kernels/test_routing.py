"""Grouping of token slots by expert, and their order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.routing import Routing, sort_slots


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


def test_slots_are_sorted_by_coefficient_then_expert() -> None:
    ids = torch.tensor([[3, 1, 2], [5, 0, 4], [1, 2, 0]])
    weights = torch.tensor([[0.2, 0.5, 0.3], [0.25, 0.25, 0.5], [0.4, 0.3, 0.3]])
    sorted_ids, sorted_weights = sort_slots(ids, weights)
    assert sorted_ids.tolist() == [[1, 2, 3], [4, 0, 5], [1, 0, 2]]
    torch.testing.assert_close(
        sorted_weights, torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.25, 0.25], [0.4, 0.3, 0.3]])
    )


@given(st.integers(0, 2**31), st.integers(1, 4), st.booleans())
def test_sorted_slots_hold_the_same_pairs_in_one_order(seed: int, top_k: int, coarse: bool) -> None:
    """Whatever the order given, and with coefficients that are equal."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(8, 6, generator=generator).argsort(1)[:, :top_k]
    weights = torch.rand(8, top_k, generator=generator)
    if coarse:
        weights = (weights * 2).round() / 2
    given_order = torch.rand(8, top_k, generator=generator).argsort(1)
    sorted_ids, sorted_weights = sort_slots(ids.gather(1, given_order), weights.gather(1, given_order))
    for row in range(8):
        pairs = zip(ids[row].tolist(), weights[row].tolist(), strict=True)
        expected = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        assert list(zip(sorted_ids[row].tolist(), sorted_weights[row].tolist(), strict=True)) == expected


def test_expert_order_sorts_each_token() -> None:
    ids = torch.tensor([[2, 0, 1], [0, 2, 3], [3, 1, 0]])
    assert ids.gather(1, Routing.group(ids, 4).expert_order()).tolist() == ids.sort(1).values.tolist()


def test_experts_of_grouped_rows() -> None:
    routing = Routing.group(torch.tensor([[2, 0], [0, 2], [2, 1]]), 4)
    assert routing.experts.tolist() == [0, 0, 1, 2, 2, 2]

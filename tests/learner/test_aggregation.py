"""Closed forms on one hand-made batch: three sequences of 1, 2 and 0 tokens of at most 4."""

from __future__ import annotations

import pytest
import torch

from learner.aggregation import aggregate
from learner.batch import Totals
from learner.config import LOSS_AGGREGATIONS, ObjectiveConfig

MASK = torch.tensor([[True, False], [True, True], [False, False]])
VALUES = torch.tensor([6.0, 1.0, 3.0])
TOTALS = Totals(tokens=3, sequences=2, rows=3)
EXPECTED = {
    "token_mean": 10 / 3,
    "sequence_mean": (6 + (1 + 3) / 2) / 2,  # the sequence without tokens is not counted
    "dr_grpo": 10 / (3 * 4),
}


def config(aggregation: str) -> ObjectiveConfig:
    return ObjectiveConfig(loss_aggregation=aggregation, max_response_tokens=4)


def test_every_aggregation_is_tested() -> None:
    assert EXPECTED.keys() == set(LOSS_AGGREGATIONS)


@pytest.mark.parametrize("aggregation", EXPECTED)
def test_closed_form(aggregation: str) -> None:
    found = aggregate(VALUES, MASK, TOTALS, config(aggregation))
    assert found.item() == pytest.approx(EXPECTED[aggregation])


@pytest.mark.parametrize("aggregation", EXPECTED)
def test_parts_add_up_to_the_whole(aggregation: str) -> None:
    """Each part is divided by the counts of the whole mini-batch, not by its own."""
    rows = ((slice(0, 1), VALUES[:1]), (slice(1, 3), VALUES[1:]))
    parts = [aggregate(values, MASK[part], TOTALS, config(aggregation)) for part, values in rows]
    assert sum(parts).item() == pytest.approx(EXPECTED[aggregation])


def test_equal_values_in_sequences_of_different_lengths() -> None:
    """A token mean lets the long sequence weigh more, a sequence mean does not, a constant keeps the sum."""
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 2:] = False
    values = torch.tensor([1.0] * 8 + [-1.0] * 2)
    totals = Totals(tokens=10, sequences=2, rows=2)
    found = {name: aggregate(values, mask, totals, config(name)).item() for name in EXPECTED}
    assert found == pytest.approx({"token_mean": 0.6, "sequence_mean": 0.0, "dr_grpo": 6 / 8})

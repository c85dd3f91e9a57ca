from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.batch import Totals, TrainBatch, cut


def make_batch(lengths: list[int]) -> TrainBatch:
    count, width = len(lengths), max(lengths)
    tokens = torch.arange(count * width).view(count, width)
    tensor = torch.tensor(lengths)
    mask = (torch.arange(width) >= 1) & (torch.arange(width) < tensor[:, None])
    logp = torch.arange(float(count * width)).view(count, width)
    parts = {"reference_logp": logp + 0.25, "old_values": logp + 2, "returns": logp + 3}
    return TrainBatch(tokens, tensor, mask, logp, logp + 0.5, torch.arange(float(count)), **parts)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(LENGTHS, st.integers(40, 200))
def test_every_row_is_in_one_micro_batch_that_fits(lengths: list[int], limit: int) -> None:
    groups = cut(torch.tensor(lengths), limit)
    assert sorted(torch.cat(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        assert sum(lengths[row] for row in group.tolist()) <= limit


@given(LENGTHS, st.integers(40, 200))
def test_no_row_fits_into_a_micro_batch_before_its_own(lengths: list[int], limit: int) -> None:
    groups = [[lengths[row] for row in group.tolist()] for group in cut(torch.tensor(lengths), limit)]
    for number, group in enumerate(groups):
        assert group == sorted(group, reverse=True)
        for length in group:
            earlier = [sum(other for other in before if other >= length) for before in groups[:number]]
            assert all(filled + length > limit for filled in earlier)


def test_a_sequence_longer_than_a_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17 tokens .* micro_batch_tokens=16"):
        cut(torch.tensor([3, 17]), 16)


def test_micro_batches_hold_the_rows_cropped_to_the_longest() -> None:
    batch = make_batch([3, 8, 2, 5])
    parts = batch.micro_batches(10)
    assert [part.lengths.tolist() for part in parts] == [[8, 2], [5, 3]]
    second = parts[1]
    assert torch.equal(second.tokens, batch.tokens[[3, 0], :5])
    assert torch.equal(second.loss_mask, batch.loss_mask[[3, 0], :5])
    assert torch.equal(second.sampler_logp, batch.sampler_logp[[3, 0], :5])
    assert torch.equal(second.old_logp, batch.old_logp[[3, 0], :5])
    assert second.advantages.tolist() == [3.0, 0.0]
    for name in ("reference_logp", "old_values", "returns"):
        assert torch.equal(getattr(second, name), getattr(batch, name)[[3, 0], :5])
    assert sum(part.totals.tokens for part in parts) == batch.totals.tokens == 2 + 7 + 1 + 4


def test_totals_count_sequences_with_and_without_tokens_in_the_loss() -> None:
    batch = make_batch([3, 8, 1, 5])  # a sequence of its prompt alone has no response
    assert batch.totals == Totals(tokens=2 + 7 + 4, sequences=3, rows=4)


def test_fields_at_the_tokens_of_the_loss_mask() -> None:
    batch = make_batch([3, 2])
    assert batch.in_loss("sampler_logp").tolist() == [1.0, 2.0, 4.0]
    assert batch.in_loss("advantages").tolist() == [0.0, 0.0, 1.0]


def test_advantages_may_be_those_of_tokens() -> None:
    batch = make_batch([3, 4])
    batch = dataclasses.replace(batch, advantages=torch.arange(8.0).view(2, 4))
    assert batch.in_loss("advantages").tolist() == [1.0, 2.0, 5.0, 6.0, 7.0]
    assert batch.select(torch.tensor([0])).advantages.tolist() == [[0.0, 1.0, 2.0]]


def test_parts_that_are_not_there_stay_away() -> None:
    batch = dataclasses.replace(make_batch([3, 2]), reference_logp=None, old_values=None, returns=None)
    for other in (batch.select(torch.tensor([1])), batch.to(torch.device("cpu"))):
        assert other.reference_logp is other.old_values is other.returns is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", torch.zeros(2, 4), "tokens must be torch.int64"),
        ("tokens", torch.zeros(8, dtype=torch.int64), "tokens must have shape"),
        ("tokens", torch.zeros(0, 4, dtype=torch.int64), "at least one row"),
        ("lengths", torch.tensor([4]), "lengths must be torch.int64"),
        ("lengths", torch.tensor([4, 0]), r"lengths must lie in \[1, 4\]"),
        ("lengths", torch.tensor([4, 5]), r"lengths must lie in \[1, 4\]"),
        ("loss_mask", torch.zeros(2, 4), "loss_mask must be torch.bool"),
        ("loss_mask", torch.tensor([[False] * 4, [False, False, False, True]]), "beyond the length"),
        ("loss_mask", torch.tensor([[True] * 4, [False] * 4]), "first token"),
        ("sampler_logp", torch.zeros(2, 3), "sampler_logp must be torch.float32"),
        ("old_logp", torch.zeros(2, 4, dtype=torch.float64), "old_logp must be torch.float32"),
        ("advantages", torch.zeros(2, 3), "advantages must be torch.float32"),
        ("advantages", torch.zeros(3), "advantages must be torch.float32"),
        ("reference_logp", torch.zeros(2, 3), "reference_logp must be torch.float32"),
        ("returns", torch.zeros(2), "returns must be torch.float32"),
        ("old_values", torch.zeros(2, 4).double(), "old_values must be torch.float32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(field: str, value: torch.Tensor, message: str) -> None:
    parts = {
        "tokens": torch.zeros(2, 4, dtype=torch.int64),
        "lengths": torch.tensor([4, 3]),
        "loss_mask": torch.zeros(2, 4, dtype=torch.bool),
        "sampler_logp": torch.zeros(2, 4),
        "old_logp": torch.zeros(2, 4),
        "advantages": torch.zeros(2),
    }
    TrainBatch(**parts)
    with pytest.raises(ValueError, match=message):
        TrainBatch(**{**parts, field: value})

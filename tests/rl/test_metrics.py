from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.batch import TrainBatch
from learner.config import KLConfig, ObjectiveConfig
from learner.correction import correct
from learner.objective import policy_loss
from rl.gap import gap_statistics
from rl.metrics import METRICS, Reducer, UnknownMetric, number, numbers, reduce

FINITE = st.floats(-1e9, 1e9)
BY_REDUCER = {
    Reducer.FIRST: "policy/log_ratio_abs",
    Reducer.LAST: "policy/lr",
    Reducer.MEAN: "reward/mean",
    Reducer.TOKEN_MEAN: "policy/loss",
    Reducer.SUM: "time/generate",
    Reducer.MAX: "memory/driver",
}


@given(st.lists(st.tuples(FINITE, st.integers(1, 10**6)), min_size=1, max_size=50))
def test_reducers_agree_with_numpy(pairs: list[tuple[float, int]]) -> None:
    values, tokens = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    expected = {
        Reducer.FIRST: values[0],
        Reducer.LAST: values[-1],
        Reducer.MEAN: np.mean(values),
        Reducer.TOKEN_MEAN: np.average(values, weights=tokens),
        Reducer.SUM: np.sum(values),
        Reducer.MAX: np.max(values),
    }
    for reducer, name in BY_REDUCER.items():
        assert METRICS[name].reducer is reducer
        scale = np.abs(values).max() * len(values)
        assert reduce(name, values, tokens) == pytest.approx(expected[reducer], rel=1e-12, abs=1e-12 * scale)


@given(st.lists(FINITE, min_size=1), st.randoms())
def test_mean_and_sum_do_not_depend_on_the_order(values: list[float], random) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)
    for name in ("reward/mean", "time/generate"):
        assert reduce(name, values) == reduce(name, shuffled)


def test_a_sum_of_counts_is_a_count() -> None:
    total = reduce("tokens/generated", [np.int64(2**60), torch.tensor(1)])
    assert type(total) is int
    assert total == 2**60 + 1


def test_a_token_mean_over_parts_is_the_mean_over_all_tokens() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal(size) for size in (3, 100, 17)]
    reduced = reduce("policy/loss", [part.mean() for part in parts], [len(part) for part in parts])
    assert reduced == pytest.approx(np.concatenate(parts).mean(), rel=1e-12)


def test_statistics_of_the_whole_step_cannot_be_combined() -> None:
    assert reduce("gap/p99", [0.1]) == 0.1
    with pytest.raises(ValueError, match="gap/p99: 2 values"):
        reduce("gap/p99", [0.1, 0.2])


@pytest.mark.parametrize("weights", [None, [1], [0, 0], [2, -1]])
def test_token_means_need_usable_weights(weights: list[int] | None) -> None:
    with pytest.raises(ValueError, match="policy/loss"):
        reduce("policy/loss", [1.0, 2.0], weights)


def test_nothing_cannot_be_reduced() -> None:
    with pytest.raises(ValueError, match="reward/mean: nothing"):
        reduce("reward/mean", [])


def test_unknown_names_are_refused() -> None:
    for use in (lambda: reduce("reward/meen", [1.0]), lambda: numbers({"reward/meen": 1.0})):
        with pytest.raises(UnknownMetric, match="reward/meen"):
            use()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int32(3), 3),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor([7]), 7),
        (np.array(2.5), 2.5),
        (4, 4),
    ],
)
def test_scalars_of_other_libraries_become_python_numbers(value: object, expected: float | int) -> None:
    converted = number("policy/loss", value)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize("value", ["1", None, True, np.bool_(True), 1j, np.zeros(2), torch.zeros(2), {}])
def test_what_is_not_one_number_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="policy/loss"):
        number("policy/loss", value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, torch.tensor(math.nan), np.float32(math.inf)]
)
def test_infinity_and_nan_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"policy/loss=.*finite"):
        number("policy/loss", value)


def test_the_table_has_what_the_run_computes() -> None:
    logp, mask = torch.zeros(2, 4), torch.tensor([[False, True, True, True]] * 2)
    tokens, lengths = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([4, 4])
    batch = TrainBatch(tokens, lengths, mask, logp, logp, torch.ones(2), reference_logp=logp)
    objective = ObjectiveConfig(kl=KLConfig(coefficient=0.1))
    _, policy = policy_loss(batch, logp, logp, batch.totals, objective)
    correction = correct(logp, logp, mask, objective.correction).statistics()
    names = {f"policy/{name}" for name in policy} | {f"correction/{name}" for name in correction}
    names |= gap_statistics(logp[0], logp[1], objective).keys() | {
        "gap/older_abs_mean",
        "gap/outside_nucleus",
        "gap/route_mismatch",
    }
    assert names <= METRICS.keys()
    assert {row.name for row in METRICS.values() if row.section in ("gap", "correction")} <= names


def test_every_row_is_described() -> None:
    for row in METRICS.values():
        assert row.meaning and not row.meaning.endswith("."), row
        assert "/" in row.name and row.name == row.name.strip()
        assert row.volatile == (row.name.split("/")[0] in ("time", "rate", "memory", "usage"))

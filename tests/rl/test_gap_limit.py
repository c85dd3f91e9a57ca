"""Bounds on the gap over a run's iterations, and the load of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.config.algorithm import AlgorithmConfig, GapLimitConfig
from rl.expert_load import LAYERS, expert_load_by_layer
from rl.gap_limit import GapLimitExceeded, GapWatch
from rl.job import Job
from rl.metrics import METRICS

GOOD = {"gap/p99": 0.1, "gap/k3": 0.001, "gap/ess": 0.99}
BAD = {"gap/p99": 0.5, "gap/k3": 0.2, "gap/ess": 0.4}
BOUNDS = {"p99": 0.3, "k3": 0.01, "ess": 0.9}


@pytest.mark.parametrize("name", BOUNDS)
def test_each_bound_counts_by_itself(name: str):
    watch = GapWatch(GapLimitConfig(**{name: BOUNDS[name]}, times=2, within=5), {})
    only = GOOD | {f"gap/{name}": BAD[f"gap/{name}"]}
    assert watch.see(1, only) is None
    assert watch.see(2, GOOD) is None
    found = watch.see(3, only)
    assert found is not None
    assert f"gap/{name}={BAD[f'gap/{name}']:g}" in found and f"{BOUNDS[name]:g}" in found
    assert "2 of the last 3 iterations" in found


def test_without_bounds_nothing_is_said():
    watch = GapWatch(GapLimitConfig(), {})
    assert all(watch.see(step, BAD) is None for step in range(1, 20))


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(0, 6),
    st.integers(0, 40),
)
def test_counts_the_iterations_of_the_window_and_a_resumed_run_those_before(
    crossings: list[bool], times: int, more: int, resumed_after: int
):
    within = times + more
    limit = GapLimitConfig(p99=0.3, times=times, within=within)
    steps = {step: BAD if bad else GOOD for step, bad in enumerate(crossings, start=1)}
    expected = [
        bad and sum(crossings[max(0, index + 1 - within) : index + 1]) >= times
        for index, bad in enumerate(crossings)
    ]
    watch = GapWatch(limit, {})
    assert [watch.see(step, metrics) is not None for step, metrics in steps.items()] == expected
    before = {step: metrics for step, metrics in steps.items() if step <= resumed_after}
    resumed = GapWatch(limit, before)
    after = [
        resumed.see(step, metrics) is not None for step, metrics in steps.items() if step > resumed_after
    ]
    assert after == expected[resumed_after:]


class Owner:
    """The parts of a job that watch the gap."""

    def __init__(self, action: str, saved: list[int]) -> None:
        self.config: Any = type("C", (), {"algorithm": AlgorithmConfig(gap_limit=limit(action))})
        self.gap_watch = GapWatch(limit(action), {})
        self.checkpoints: Any = type("S", (), {"steps": staticmethod(lambda: saved)})


def limit(action: str) -> GapLimitConfig:
    return GapLimitConfig(p99=0.3, times=2, within=2, action=action)


def test_halting_saves_first_and_warning_goes_on(caplog: pytest.LogCaptureFixture):
    saved: list[int] = []
    owner: Any = Owner("halt", saved)
    Job.watch(owner, 1, BAD, partial(saved.append, 1))
    assert not saved
    with pytest.raises(GapLimitExceeded, match=r"iteration 2: gap/p99=0.5 is above 0.3; .* 2 of the last 2"):
        Job.watch(owner, 2, BAD, partial(saved.append, 2))
    assert saved == [2]
    saved.append(3)  # by its turn
    with pytest.raises(GapLimitExceeded):
        Job.watch(owner, 3, BAD, partial(pytest.fail, "saved twice"))
    warned: Any = Owner("warn", saved)
    for step in (1, 2):
        Job.watch(warned, step, BAD, partial(pytest.fail, "saved"))
    assert "2 of the last 2 iterations" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [{"p99": 0.0}, {"k3": float("inf")}, {"ess": 1.5}, {"times": 0}, {"times": 5, "within": 4}],
    ids=str,
)
def test_limits_that_cannot_work_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=r"algorithm\.gap_limit"):
        GapLimitConfig(**wrong)


def test_expert_loads_of_each_layer():
    counts = torch.tensor([[4, 4, 0, 0], [2, 2, 2, 2], [8, 0, 0, 0]])
    found = expert_load_by_layer(counts)
    assert found.keys() <= METRICS.keys()
    assert [found[f"experts/active/{layer:03d}"] for layer in range(3)] == [2, 4, 1]
    assert [found[f"experts/load/{layer:03d}"] for layer in range(3)] == [2.0, 1.0, 4.0]


def test_layers_that_the_table_does_not_have_are_left_out():
    found = expert_load_by_layer(torch.ones(LAYERS + 2, 3, dtype=torch.int64))
    assert found.keys() <= METRICS.keys()
    assert len(found) == 2 * LAYERS

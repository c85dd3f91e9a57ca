"""Rollouts that are drawn before, or behind, an update: order, versions, errors, and what a checkpoint holds."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl.data.prompts import Prompt
from rl.groups import AllSolved
from rl.metrics import METRICS
from rl.partial import Backlog
from rl.pipeline import OneStepOff, RolloutBatch, Serial, StaleRollouts, open_pipeline, staleness
from rl.rewards.score import Score
from rl.rollout import Group, Rollout
from rl.rollout_store import load_rollouts, save_rollouts
from rl.stages import Stages
from tests.rl.rollouts import group, rollout


class Sampler:
    """Batch at cursor n: one group of prompt n, by the weights that it has when it is asked; two prompts a batch. Those
    after the first may be held up."""

    def __init__(self) -> None:
        self.version = 1
        self.drawn: list[int] = []
        self.busy = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fails: Exception | None = None

    def collect(self, position: int, backlog: Backlog, stages: Stages) -> RolloutBatch:
        with stages("generate"):
            version = self.version
            if position:
                self.busy.set()
                assert self.may_go_on.wait(10)
                self.busy.clear()
        with stages("reward"):
            if self.fails and position:
                raise self.fails
            self.drawn.append(position)
            return RolloutBatch(
                [written_by(version, position)], position + 2, {"reward/mean": float(position)}
            )


def written_by(version: int, position: int = 0, length: int = 3) -> Group:
    one = rollout(1.0, length=length)
    return group(
        replace(one, completion=replace(one.completion, versions=(version,) * length)), position=position
    )


def stages() -> Stages:
    return Stages(lambda stage: None)


def run(
    sampler: Sampler, pipeline: OneStepOff | Serial, position: int, iterations: int
) -> list[tuple[int, int]]:
    """(prompt, age of its responses) of each iteration."""
    found = []
    with pipeline:
        for _ in range(iterations):
            batch = pipeline.take(position, stages())
            [own] = batch.groups
            found.append((own.prompt.position, sampler.version - own.rollouts[0].completion.versions[0]))
            position = batch.position
            pipeline.settle(stages())
            sampler.version += 1
    return found


def test_serial_rollouts_are_of_the_present_weights():
    sampler = Sampler()
    assert run(sampler, Serial(sampler.collect), 0, 4) == [(0, 0), (2, 0), (4, 0), (6, 0)]


def test_one_step_off_takes_the_same_prompts_one_version_old_and_draws_none_in_vain():
    sampler = Sampler()
    pipeline = open_pipeline("one_step_off", sampler.collect, 4, None)
    assert run(sampler, pipeline, 0, 4) == [(0, 0), (2, 1), (4, 1), (6, 1)]
    assert sampler.drawn == [0, 2, 4, 6]
    assert pipeline.ahead is None


def test_sampling_goes_on_while_the_learner_works_and_is_over_when_weights_change():
    sampler = Sampler()
    with OneStepOff(sampler.collect, 2) as pipeline:
        sampler.may_go_on.clear()
        first = pipeline.take(0, stages())
        assert sampler.busy.wait(10)  # the driver is here, and the sampler at work
        settled = threading.Thread(target=pipeline.settle, args=[stages()])
        settled.start()
        settled.join(0.05)
        assert settled.is_alive()
        sampler.may_go_on.set()
        settled.join(10)
        assert not settled.is_alive() and not sampler.busy.is_set()
        assert pipeline.ahead is not None and pipeline.ahead.position == 4
        second = pipeline.take(first.position, stages())
    assert second.metrics.keys() == {"reward/mean", "time/overlapped"} <= METRICS.keys()


def test_a_shortage_of_groups_is_raised_when_the_batch_is_due():
    sampler = Sampler()
    sampler.fails = AllSolved("nothing left")
    with OneStepOff(sampler.collect, 3) as pipeline:
        pipeline.take(0, stages())
        pipeline.settle(stages())  # what the update taught is sent first
        assert pipeline.ahead is None
        with pytest.raises(AllSolved, match="nothing left"):
            pipeline.take(2, stages())


def test_any_other_error_ends_the_run_before_the_weights_change():
    sampler = Sampler()
    sampler.fails = RuntimeError("the sampler died")
    with OneStepOff(sampler.collect, 3) as pipeline, pytest.raises(RuntimeError, match="the sampler died"):
        pipeline.take(0, stages())
        pipeline.settle(stages())


def test_a_failing_run_waits_for_the_stage_under_way_and_begins_no_other():
    sampler = Sampler()
    with pytest.raises(KeyError), OneStepOff(sampler.collect, 3) as pipeline:
        sampler.may_go_on.clear()
        pipeline.take(0, stages())
        assert sampler.busy.wait(10)
        threading.Timer(0.05, sampler.may_go_on.set).start()
        raise KeyError("the learner failed")
    assert sampler.drawn == [0]  # generated, but not scored


def test_a_resumed_run_learns_from_the_same_responses(tmp_path: Path):
    """Four iterations, or a stop after each and another process that has only the checkpoint."""
    sampler = Sampler()
    whole = run(sampler, OneStepOff(sampler.collect, 4), 0, 4)
    found, position, ahead = [], 0, None
    for iteration in range(4):
        resumed = Sampler()
        resumed.version = iteration + 1
        with OneStepOff(resumed.collect, 4 - iteration, ahead) as pipeline:
            batch = pipeline.take(position, stages())
            [own] = batch.groups
            found.append((own.prompt.position, resumed.version - own.rollouts[0].completion.versions[0]))
            pipeline.settle(stages())
            position = batch.position
            if pipeline.ahead is not None:
                save_rollouts(tmp_path / str(iteration), pipeline.ahead)
        ahead = load_rollouts(tmp_path / str(iteration), prompt_at)
    assert found == whole and ahead is None


def prompt_at(position: int) -> Prompt:
    return group(position=position).prompt


@pytest.mark.parametrize("routed", [False, True])
def test_stored_rollouts_come_back_as_they_were(tmp_path: Path, routed: bool):
    generator = np.random.default_rng(0)

    def response(length: int, score: Score, reason: str) -> Rollout:
        one = rollout(0.0, length=length).completion
        logp = tuple(np.log(generator.random(length, np.float32)).tolist())
        routes = generator.integers(0, 8, (2 + length, 3, 2)).astype(np.int16) if routed else None
        return Rollout(
            replace(one, logp=logp, finish_reason=reason, versions=tuple(range(length)), routes=routes), score
        )

    batch = RolloutBatch(
        [
            group(
                response(3, Score.of(True), "stop"),
                response(1, Score.failed("no verdict"), "length"),
                position=4,
            ),
            group(response(5, Score(0.1 + 0.2, False, details={"x": 1.5}), "stop"), position=11),
        ],
        13,
        {"reward/mean": 1 / 3, "groups/kept": 2, "time/overlapped": 0.5},
    )
    save_rollouts(tmp_path / "rollouts", batch)
    found = load_rollouts(tmp_path / "rollouts", prompt_at)
    assert found == batch
    for ours, theirs in zip(found.groups, batch.groups, strict=True):
        for one, other in zip(ours.rollouts, theirs.rollouts, strict=True):
            assert np.array_equal(one.completion.routes, other.completion.routes) if routed else True
            assert (one.completion.routes is not None) == routed


def test_staleness_counts_tokens():
    statistics = staleness([written_by(5, length=1), written_by(4, length=3)], 5, 1)
    assert statistics == {
        "staleness/mean": 0.75,
        "staleness/max": 1,
        "staleness/older_tokens": 0.75,
        "version/weights": 4,
    }
    assert statistics.keys() <= METRICS.keys()


@pytest.mark.parametrize(("version", "bound"), [(6, 1), (3, 1), (5, 0)])
def test_responses_that_are_too_old_or_of_the_future_are_refused(version: int, bound: int):
    with pytest.raises(StaleRollouts, match=rf"version 4 to 4.*version {version}.*max_staleness={bound}"):
        staleness([written_by(4)], version, bound)

"""One iteration of the driver with a learner and a sampler that only keep what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from rich.console import Console

from kernels.routing import NO_ROUTE
from learner.batch import TrainBatch
from learner.config import CriticConfig, KLConfig, ObjectiveConfig
from rl.checkpoint import CheckpointStore
from rl.collect import collect
from rl.config.algorithm import AdvantageConfig, AlgorithmConfig, GapLimitConfig, ShapingConfig
from rl.config.scoring import EvaluationConfig
from rl.gap_limit import GapLimitExceeded, GapWatch
from rl.groups import TooFewGroups
from rl.job import Job
from rl.loop import Progress, iterate, run_iterations
from rl.metrics import METRICS
from rl.partial import Backlog, PartialGroup
from rl.pipeline import Serial, StaleRollouts
from rl.records.history import read_history
from rl.records.logger import RunLogger
from rl.records.view import RunView
from rl.rollout import Group, Sequences
from rl.run_folder import RunFolder
from sampler.config import SamplingConfig
from sampler.engine import Completion
from tests.rl.rollouts import PROMPT, group, rollout

STAGES: Any = lambda name: nullcontext()  # noqa: E731
SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, max_tokens=8)


class FakeLearner:
    """Scores a token at the sampler's logp plus `shift`; every update is recorded."""

    def __init__(self, shift: float) -> None:
        self.shift = shift
        self.sampled_with: list[tuple[float, float]] = []
        self.batches: list[TrainBatch] = []

    def score(self, sequences: Sequences, temperature: float, top_p: float, replay: str | None = None) -> Any:
        self.sampled_with.append((temperature, top_p))
        self.replay = replay
        logp = torch.where(sequences.loss_mask, sequences.sampler_logp + self.shift, 0.0)
        own = sequences.routes
        routes = None if replay is None or own is None else torch.where(own < 0, own, own + 1)
        return SimpleNamespace(logp=logp, outside_nucleus=sequences.tokens == 7, routes=routes)

    def update(
        self, batch: TrainBatch, objective: ObjectiveConfig, temperature: float, top_p: float
    ) -> dict[str, float]:
        self.sampled_with.append((temperature, top_p))
        self.batches.append(batch)
        return {"loss": 0.0, "tokens": float(batch.totals.tokens)}


class FakeCritic:
    """Values every state at 0.25; every update is recorded."""

    def __init__(self) -> None:
        self.batches: list[TrainBatch] = []

    def values(self, sequences: Sequences) -> torch.Tensor:
        return torch.where(sequences.loss_mask, 0.25, 0.0)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        self.batches.append(batch)
        return {"loss": float(len(self.batches)), "tokens": float(batch.totals.tokens)}


class FakeJob:
    """Prompt number n gets the responses `outcomes[n]`: (raw reward, length) each."""

    def __init__(self, algorithm: AlgorithmConfig, outcomes: Sequence[Sequence[tuple[float, int]]]) -> None:
        self.config = SimpleNamespace(algorithm=algorithm)
        self.task = SimpleNamespace(
            prompts=SimpleNamespace(training=lambda position: position, training_count=4)
        )
        self.outcomes = outcomes
        self.rounds: list[int] = []
        self.version = 1
        self.engines = SimpleNamespace(
            learner=FakeLearner(0.1),
            reference=FakeLearner(-0.3) if algorithm.needs_reference else None,
            critic=FakeCritic() if algorithm.objective.critic is not None else None,
            weight_sync=SimpleNamespace(sync=self.sync, rest=lambda: None),
            memory=lambda: {"memory/driver": 1.0},
            work=lambda sequences: {"tokens/learner": int(sequences.lengths.sum())},
            hardware=SimpleNamespace(usage=lambda metrics: {}),
        )

    def sync(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def write_on(self, groups: list[PartialGroup]) -> list[PartialGroup]:
        self.routed = self.config.algorithm.rollout_sampling.return_routes
        self.rounds.append(len(groups))
        return [
            PartialGroup(begun.prompt, tuple(rollout(*one).completion for one in self.outcomes[begun.prompt]))
            for begun in groups
        ]

    def score(self, prompts: list[int], responses: list[tuple[Completion, ...]]) -> list[Group]:
        groups = [
            group(
                *(
                    rollout(value, length, logp=-1.0 - n, version=self.version)
                    for value, length in self.outcomes[n]
                ),
                position=n,
            )
            for n in prompts
        ]
        return [with_routes(g) for g in groups] if self.routed else groups


def with_routes(bare: Group) -> Group:
    """Two experts of one layer for every token but the last; the first is the prompt's number."""
    rollouts = []
    for one in bare.rollouts:
        routes = np.full((len(PROMPT) + len(one.completion.token_ids), 1, 2), NO_ROUTE, np.int16)
        routes[:-1] = bare.prompt.position, 5
        rollouts.append(replace(one, completion=replace(one.completion, routes=routes)))
    return replace(bare, rollouts=tuple(rollouts))


def job_of(outcomes: Sequence[Sequence[tuple[float, int]]], **changes: Any) -> Any:
    settings = {"prompts_per_iteration": 2, "group_size": 2, "max_rounds": 3, "sampling": SAMPLING}
    return FakeJob(AlgorithmConfig(**settings | changes), outcomes)


RIGHT, WRONG, LONG = (1.0, 3), (0.0, 3), (1.0, 8)
MIXED, SOLVED, UNSOLVED = (RIGHT, WRONG), (RIGHT, RIGHT), (WRONG, WRONG)


def test_rows_stay_aligned_when_groups_are_dropped_between_rounds():
    """Rewards 0, 1 and lengths tell rows apart: each row has its own advantage, logp and length."""
    outcomes = [SOLVED, ((0.0, 2), (1.0, 5)), UNSOLVED, UNSOLVED, ((1.0, 7), (0.0, 4)), MIXED]
    job = job_of(outcomes, advantage=AdvantageConfig(estimator="dr_grpo"), updates_per_iteration=2)
    progress, metrics = iterate(job, Serial(partial(collect, job)), Progress(), STAGES)
    first, second = job.engines.learner.batches
    assert progress == Progress(iteration=1, position=6)
    for batch, number, lengths in ((first, 1, [2, 5]), (second, 4, [7, 4])):
        assert batch.loss_mask.sum(1).tolist() == lengths
        assert set(batch.sampler_logp[batch.loss_mask].tolist()) == {-1.0 - number}
        torch.testing.assert_close(batch.old_logp[batch.loss_mask], batch.in_loss("sampler_logp") + 0.1)
    assert first.advantages.tolist() == [-0.5, 0.5] and second.advantages.tolist() == [0.5, -0.5]
    assert (metrics["groups/kept"], metrics["groups/dropped_constant"]) == (2, 3)
    assert metrics["tokens/trained"] == 18


def test_dynamic_sampling_judges_raw_outcomes():
    """All right, but of different lengths: the overlong penalty would make this group look mixed."""
    outcomes = [(RIGHT, LONG), MIXED, MIXED, MIXED]
    job = job_of(outcomes, shaping=ShapingConfig(overlong_buffer=4))
    batch = collect(job, 0, Backlog(), STAGES)
    assert [g.prompt.position for g in batch.groups] == [1, 2]
    assert batch.metrics["groups/dropped_constant"] == 1


def test_a_round_may_draw_more_prompts_than_an_iteration_needs():
    job = job_of([MIXED, SOLVED, SOLVED, SOLVED, MIXED], prompts_per_round=5)
    batch = collect(job, 0, Backlog(), STAGES)
    assert job.rounds == [5] and batch.position == 5
    assert batch.metrics["groups/kept"] == 2


def test_rounds_are_bounded_and_the_error_names_kept_and_needed_groups():
    job = job_of([MIXED] + [SOLVED] * 5)
    with pytest.raises(TooFewGroups, match="1 groups kept, 2 needed, after 3 rounds"):
        collect(job, 0, Backlog(), STAGES)
    assert job.rounds == [2, 2, 2]


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_temperature_and_top_p_go_with_every_log_probability(place: str):
    job = job_of([MIXED, MIXED], objective=ObjectiveConfig(kl=KLConfig(coefficient=0.1, place=place)))
    _, metrics = iterate(job, Serial(partial(collect, job)), Progress(), STAGES)
    assert job.engines.learner.sampled_with == [(0.7, 0.9)] * 2  # score, update
    assert job.engines.reference.sampled_with == [(0.7, 0.9)]
    [batch] = job.engines.learner.batches
    torch.testing.assert_close(batch.in_loss("reference_logp"), batch.in_loss("sampler_logp") - 0.3)
    assert metrics["gap/mean"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["gap/outside_nucleus"] == pytest.approx(1 / 3)  # token 7 opens every response of three
    assert metrics.keys() <= METRICS.keys()


def test_without_a_kl_penalty_there_is_no_reference():
    job = job_of([MIXED, MIXED])
    iterate(job, Serial(partial(collect, job)), Progress(), STAGES)
    assert job.engines.learner.batches[0].reference_logp is None


WITH_CRITIC = {"advantage": AdvantageConfig(estimator="gae"), "dynamic_sampling": False}


def test_critic_and_policy_learn_from_the_same_mini_batches():
    objective = ObjectiveConfig(critic=CriticConfig())
    outcomes = [((1.0, 3), (0.0, 3)), ((0.0, 5), (0.0, 1))]
    job = job_of(outcomes, **WITH_CRITIC, objective=objective, updates_per_iteration=2)
    _, metrics = iterate(job, Serial(partial(collect, job)), Progress(), STAGES)
    assert [id(batch) for batch in job.engines.critic.batches] == [
        id(batch) for batch in job.engines.learner.batches
    ]
    first, second = job.engines.critic.batches
    assert first.in_loss("returns").tolist() == [1.0] * 3 + [0.0] * 3
    assert first.in_loss("advantages").tolist() == [0.75] * 3 + [-0.25] * 3
    assert second.in_loss("old_values").tolist() == [0.25] * 6
    assert metrics["critic/loss"] == pytest.approx(1.5)  # 6 tokens each
    assert metrics["critic/explained_variance"] == pytest.approx(0)
    assert metrics.keys() <= METRICS.keys()


def test_the_critic_alone_learns_in_its_warm_up_iterations():
    objective = ObjectiveConfig(critic=CriticConfig(warmup_iterations=2))
    job = job_of([MIXED] * 6, **WITH_CRITIC, objective=objective)
    progress, learned = Progress(), []
    for _ in range(3):
        progress, metrics = iterate(job, Serial(partial(collect, job)), progress, STAGES)
        learned.append(
            (len(job.engines.critic.batches), len(job.engines.learner.batches), "policy/loss" in metrics)
        )
        assert metrics["tokens/trained"] == 12
    assert learned == [(1, 0, False), (2, 0, False), (3, 1, True)]


@pytest.mark.parametrize("every", [1, 10])
def test_a_run_with_nothing_left_to_learn_ends_with_an_evaluation_and_may_be_resumed(
    every: int, tmp_path: Path
):
    job = job_of([MIXED, MIXED] + [SOLVED] * 6)
    folder = RunFolder.create(tmp_path, "solved", "")
    job.config.run = SimpleNamespace(iterations=5, checkpoint_every=5)
    job.config.evaluation = EvaluationConfig(every=every)
    job.view = RunView("solved", 5, Console(quiet=True))
    job.checkpoints = CheckpointStore(folder.checkpoints, 1)
    job.answer_benchmarks = lambda: {}
    job.record = partial(Job.record, job)
    job.save = lambda step, state, *_, **__: job.checkpoints.save(step, lambda folder: None, state)
    job.watch = lambda step, metrics, save: None
    progress = Progress()
    with RunLogger(folder) as job.logger, patch("rl.loop.evaluate", lambda job: {"held_out/reward": 1.0}):
        run_iterations(job, Serial(partial(collect, job)), progress)
    [checkpoint] = job.checkpoints.steps()
    assert checkpoint == 1
    for _ in range(2):
        history = read_history(folder.metrics)
        assert max(history) == 1 and history[1]["held_out/reward"] == 1.0 and "memory/driver" in history[1]
        state = job.checkpoints.latest_complete().state
        with RunLogger(folder, resumed_at=1) as job.logger, patch("rl.loop.evaluate", pytest.fail):
            run_iterations(job, Serial(partial(collect, job)), Progress(**state))


def test_a_gap_beyond_its_bounds_ends_the_run_with_a_checkpoint_and_again_when_it_is_resumed(tmp_path: Path):
    """The fake learner is 0.1 nats from the sampler, always."""
    limit = GapLimitConfig(p99=0.05, times=2, within=3, action="halt")
    job = job_of([MIXED] * 20, gap_limit=limit)
    folder = RunFolder.create(tmp_path, "gap", "")
    job.config.run = SimpleNamespace(iterations=5, checkpoint_every=5)
    job.config.evaluation = EvaluationConfig(every=10)
    job.view = RunView("gap", 5, Console(quiet=True))
    job.checkpoints = CheckpointStore(folder.checkpoints, 2)
    job.answer_benchmarks = lambda: {}
    job.record, job.watch = partial(Job.record, job), partial(Job.watch, job)
    job.save = lambda step, state, *_, **__: job.checkpoints.save(step, lambda folder: None, state)
    progress = Progress()
    for ends_at in (2, 3):
        job.gap_watch = GapWatch(limit, read_history(folder.metrics))
        resumed = None if ends_at == 2 else progress.iteration
        with (
            RunLogger(folder, resumed_at=resumed) as job.logger,
            patch("rl.loop.evaluate", lambda job: {}),
            pytest.raises(GapLimitExceeded, match=f"iteration {ends_at}: gap/p99=0.1 is above 0.05"),
        ):
            run_iterations(job, Serial(partial(collect, job)), progress)
        assert job.checkpoints.steps()[-1] == ends_at
        progress = Progress(**job.checkpoints.latest_complete().state)


@pytest.mark.parametrize(("replay", "asked"), [("off", False), ("off", True), ("r2", True), ("r3", False)])
def test_experts_are_replayed_as_configured(replay: str, asked: bool):
    """The fake learner chooses the expert after each of the sampler's."""
    sampling = SamplingConfig(max_tokens=8, return_routes=asked)
    job = job_of(
        [SOLVED, MIXED, ((0.0, 5), RIGHT), SOLVED], routing_replay=replay, sampling=sampling, max_rounds=2
    )
    _, metrics = iterate(job, Serial(partial(collect, job)), Progress(), STAGES)
    [batch] = job.engines.learner.batches
    assert job.engines.learner.replay == replay
    assert metrics.get("gap/route_mismatch") == (1.0 if asked or replay == "r3" else None)
    if replay == "off":
        assert batch.routes is None
        return
    shift = 1 if replay == "r2" else 0
    for row, number in enumerate([1, 1, 2, 2]):  # the rows of the groups that are kept
        own, length = batch.routes[row], batch.lengths[row]
        assert own[: length - 1].tolist() == [[[number + shift, 5 + shift]]] * (length - 1)
        assert (own[length - 1 :] == NO_ROUTE).all()


def test_old_responses_are_refused():
    job = job_of([MIXED, MIXED])
    with pytest.raises(StaleRollouts, match="weights version 1 to 1, and the learner holds version 4"):
        iterate(job, Serial(partial(collect, job)), Progress(iteration=3), STAGES)

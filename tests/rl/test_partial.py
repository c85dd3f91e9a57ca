"""Responses that are written in parts: which, by how much, with which random numbers, and that none is lost."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.routing import NO_ROUTE
from rl.collect import collect
from rl.compose import load_config
from rl.config.algorithm import AlgorithmConfig, PartialRolloutsConfig
from rl.data.prompts import Prompt
from rl.errors import ConfigError, DataError
from rl.groups import TooFewGroups
from rl.metrics import METRICS
from rl.partial import (
    NOTHING,
    UNFINISHED,
    Backlog,
    PartialGroup,
    begin,
    continuation_seed,
    grown,
    joined,
    requests,
)
from rl.pipeline import OneStepOff, RolloutBatch, Serial, staleness
from rl.rewards.score import Score
from rl.rollout import Group, Rollout, response_seed
from rl.rollout_store import load_backlog, load_rollouts, save_backlog, save_rollouts
from rl.stages import Stages
from sampler.config import SamplingConfig
from sampler.engine import Completion
from tests.rl.rollouts import PROMPT, group, rollout

STOP = 1
STAGES: Any = lambda name: nullcontext()  # noqa: E731


def prompt_at(position: int) -> Prompt:
    return group(position=position).prompt


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


class Writer:
    """In the place of the samplers: a token depends on the weights, what is before it, the seed and the number of the
    draw, and is a stop token once in `stops` times. A group of position n is mixed unless n % 3 == 2.
    """

    def __init__(self, algorithm: AlgorithmConfig, stops: int = 5) -> None:
        self.config = SimpleNamespace(algorithm=algorithm)
        self.task = SimpleNamespace(prompts=SimpleNamespace(training=prompt_at))
        self.version, self.stops = 1, stops
        self.rounds: list[list[PartialGroup]] = []
        self.draws: Counter[tuple[int, int]] = Counter()  # (seed, number of the draw)

    def write_on(self, groups: list[PartialGroup]) -> list[PartialGroup]:
        algorithm = self.config.algorithm
        limit, budget = algorithm.sampling.max_tokens, algorithm.token_budget
        asked = requests(groups, lambda position, k: response_seed(0, "train", position, k), limit, budget)
        parts = [
            self.part(request.tokens, seed, request.limit) for request in asked for seed in request.seeds
        ]
        self.rounds.append(grown(groups, parts, limit))
        return self.rounds[-1]

    def part(self, tokens: list[int], seed: int, limit: int) -> Completion:
        written = []
        while len(written) < limit and STOP not in written:
            self.draws[seed, len(written)] += 1
            token = digest(self.version, tuple(tokens), seed, len(written))
            written.append(STOP if token % self.stops == 0 else 7 + token % 50)
        logp = tuple(-self.version - 2.0**-n for n in range(len(written)))
        reason = "stop" if written[-1] == STOP else "length"
        return Completion(tuple(written), logp, reason, (self.version,) * len(written))

    def score(self, prompts: list[Prompt], responses: list[tuple[Completion, ...]]) -> list[Group]:
        def outcome(prompt: Prompt, k: int) -> Score:
            return Score.of(prompt.position % 3 != 2 and k == 0)

        return [
            Group(prompt, tuple(Rollout(c, outcome(prompt, k)) for k, c in enumerate(own)))
            for prompt, own in zip(prompts, responses, strict=True)
        ]


def algorithm_of(budget: int | None, max_tokens: int = 8, needed: int = 3, **changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        **{
            "prompts_per_iteration": needed,
            "group_size": 2,
            "max_rounds": 20,
            "max_staleness": 99,
            "sampling": SamplingConfig(max_tokens=max_tokens),
            "partial_rollouts": PartialRolloutsConfig(budget),
            **changes,
        }
    )


def run(writer: Writer, iterations: int) -> list[tuple[RolloutBatch, dict[str, float]]]:
    """Batches and their staleness; the weights change behind each."""
    found, position, backlog = [], 0, NOTHING
    for _ in range(iterations):
        batch = collect(writer, position, backlog, STAGES)
        ages = staleness(batch.groups, writer.version, writer.config.algorithm.oldest)
        found.append((batch, ages))
        position, backlog = batch.position, batch.backlog
        writer.version += 1
    return found


@settings(deadline=None, max_examples=150)
@given(
    budget=st.integers(1, 9),
    max_tokens=st.integers(1, 9),
    needed=st.integers(1, 4),
    round_size=st.integers(1, 9),
    dynamic=st.booleans(),
    stops=st.integers(2, 9),
)
def test_no_response_is_lost_doubled_or_older_than_allowed(
    budget: int, max_tokens: int, needed: int, round_size: int, dynamic: bool, stops: int
) -> None:
    algorithm = algorithm_of(
        budget, max_tokens, needed, prompts_per_round=round_size, dynamic_sampling=dynamic
    )
    writer = Writer(algorithm, stops)
    batches = run(writer, 6)  # the staleness of each is checked
    written = Counter[tuple[int, int]]()  # (prompt, response) -> tokens of it
    for groups in writer.rounds:
        assert len(groups) <= round_size
        for own in groups:
            for k, c in enumerate(own.completions):
                assert 0 <= len(c.token_ids) - written[own.prompt.position, k] <= budget
                written[own.prompt.position, k] = len(c.token_ids)
                assert len(c.token_ids) == len(c.logp) == len(c.versions) <= max_tokens
                assert list(c.versions) == sorted(c.versions)
                ended = STOP in c.token_ids or len(c.token_ids) == max_tokens
                assert (c.finish_reason == UNFINISHED) is not ended
                assert STOP not in c.token_ids[:-1]
    assert all(count == 1 for count in writer.draws.values())  # no random number is used twice
    assert sum(batch.metrics["tokens/generated"] for batch, _ in batches) == sum(written.values())

    learned = [g.prompt.position for batch, _ in batches for g in batch.groups]
    assert len(set(learned)) == len(learned) == 6 * needed
    for batch, _ in batches:
        for own in batch.groups:
            assert all(one.completion.finish_reason in ("stop", "length") for one in own.rollouts)
    last = batches[-1][0]
    under_way = [g.prompt.position for g in last.backlog.under_way]
    waiting = [g.prompt.position for g in last.backlog.waiting]
    assert len(under_way) + len(waiting) <= round_size
    dropped = [n for n in range(last.position) if n % 3 == 2] if dynamic else []
    lost = set(range(last.position)) - {*learned, *under_way, *waiting, *dropped}
    if algorithm.parts > 1:
        assert not lost
        assert (last.metrics["partial/put_aside"], last.metrics["partial/waiting"]) == (
            last.backlog.unfinished,
            len(waiting),
        )
        assert last.metrics["partial/put_aside_tokens"] == sum(g.tokens for g in last.backlog.under_way)
    else:
        assert not last.backlog and not any(name.startswith("partial/") for name in last.metrics)
    assert last.metrics.keys() <= METRICS.keys()


def test_every_iteration_goes_on_with_all_that_is_under_way() -> None:
    """Six groups at once and two an iteration: more complete than are learned from, and nobody waits for a round."""
    writer = Writer(algorithm_of(3, needed=2, prompts_per_round=8, dynamic_sampling=False), stops=7)
    under_way: dict[tuple[int, int], int] = {}
    position, backlog, enough = 0, NOTHING, 0
    for _ in range(8):
        enough += len(backlog.waiting) >= 2 and backlog.unfinished > 0
        before = len(writer.rounds)
        batch = collect(writer, position, backlog, STAGES)
        assert len(writer.rounds) > before
        for own in writer.rounds[-1]:
            for k, c in enumerate(own.completions):
                assert len(c.token_ids) > under_way.get((own.prompt.position, k), 0)
        assert batch.metrics["partial/continued"] == backlog.unfinished
        backlog, position = batch.backlog, batch.position
        under_way = {
            (own.prompt.position, k): len(own.completions[k].token_ids)
            for own in backlog.under_way
            for k in own.unfinished
        }
    assert enough > 1


@pytest.mark.parametrize("budget", [None, 8, 50])
def test_a_budget_that_nothing_exceeds_changes_nothing(budget: int | None) -> None:
    """Rounds, requests and seeds are those of a plain run, and the surplus is dropped."""
    writer = Writer(algorithm_of(budget))
    [(first, _), (second, _)] = run(writer, 2)
    assert [[g.prompt.position for g in groups] for groups in writer.rounds] == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11],
    ]  # fmt: skip
    assert [g.prompt.position for g in first.groups + second.groups] == [0, 1, 3, 6, 7, 9]
    assert first.backlog == second.backlog == NOTHING
    asked = requests([begin(prompt_at(4), 3)], lambda position, k: 10 * position + k, 8, 8)
    assert [(r.tokens, r.seeds, r.limit) for r in asked] == [(list(PROMPT), [40, 41, 42], 8)]


def test_a_budget_that_no_response_reaches_writes_the_same_responses() -> None:
    """Without dynamic sampling there is no surplus to wait, either."""
    short, plain = (Writer(algorithm_of(budget, 60, dynamic_sampling=False), 2) for budget in (59, None))
    assert [b.groups for b, _ in run(short, 4)] == [b.groups for b, _ in run(plain, 4)]


def test_requests_hold_what_was_written_and_ask_for_what_is_left() -> None:
    begun = [
        Completion((9, 8, 7), (-1.0,) * 3, UNFINISHED, (1,) * 3),
        Completion((9, 1), (-1.0,) * 2, "stop", (1,) * 2),
        Completion((6, 6, 6), (-1.0,) * 3, UNFINISHED, (1,) * 3),
    ]
    groups = [PartialGroup(prompt_at(2), tuple(begun)), begin(prompt_at(3), 2)]
    seed = lambda position, k: 10 * position + k  # noqa: E731
    asked = requests(groups, seed, max_tokens=8, budget=6)
    assert [r.tokens for r in asked] == [[*PROMPT, 9, 8, 7], [*PROMPT, 6, 6, 6], [*PROMPT]]
    assert [r.seeds for r in asked] == [[continuation_seed(20, 3)], [continuation_seed(22, 3)], [30, 31]]
    assert [r.limit for r in asked] == [5, 5, 6]

    parts = [Completion((n,) * 2, (-2.0,) * 2, "length", (4,) * 2) for n in range(4)]
    found = grown(groups, parts, 5)
    assert [c.token_ids for c in found[0].completions] == [(9, 8, 7, 0, 0), (9, 1), (6, 6, 6, 1, 1)]
    assert [c.finish_reason for c in found[0].completions] == ["length", "stop", "length"]
    assert found[0].completions[0].versions == (1, 1, 1, 4, 4)
    assert found[0].completions[0].logp == (-1.0, -1.0, -1.0, -2.0, -2.0)
    assert [c.token_ids for c in found[1].completions] == [(2, 2), (3, 3)]
    assert found[1].unfinished == [0, 1]


def test_seeds_of_continuations_are_their_own() -> None:
    seeds = [continuation_seed(seed, written) for seed in (0, 1, 2**63 - 1) for written in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert continuation_seed(17, 0) == 17


def test_tokens_keep_their_experts_and_the_last_one_gets_those_under_which_it_was_read() -> None:
    def routes(length: int, expert: int) -> np.ndarray:
        own = np.full((length, 1, 2), expert, np.int16)
        own[-1] = NO_ROUTE
        return own

    first = Completion((7, 8, 9), (-1.0,) * 3, UNFINISHED, (1,) * 3, routes(2 + 3, 1))
    second = Completion((7, 7), (-1.0,) * 2, "length", (2,) * 2, routes(2 + 3 + 2, 2))
    third = Completion((7,), (-1.0,), "stop", (4,), routes(2 + 5 + 1, 4))
    whole = joined(joined(first, second, 8), third, 8)
    assert whole.routes[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 4, NO_ROUTE]
    assert (
        joined(replace(first, token_ids=(), logp=(), versions=(), routes=None), third, 8).routes
        is third.routes
    )


class Pipelines:
    """Batches of `Writer` by a pipeline, whose weights change behind each; by several processes, if it is stopped."""

    def __init__(self, folder: Path, kind: type[Serial] | type[OneStepOff]) -> None:
        self.folder, self.kind = folder, kind

    def run(self, iterations: int, stops: bool) -> list[RolloutBatch]:
        found: list[RolloutBatch] = []
        position, version, ahead, backlog = 0, 1, None, NOTHING
        while len(found) < iterations:
            writer = Writer(algorithm_of(3), stops=9)
            writer.version = version
            collector = lambda *state, own=writer: collect(own, *state)  # noqa: E731
            left = iterations - len(found)
            pipeline: Any = (
                Serial(collector, backlog)
                if self.kind is Serial
                else OneStepOff(collector, left, ahead, backlog)
            )
            with pipeline:
                for _ in range(1 if stops else left):
                    batch = pipeline.take(position, Stages(lambda stage: None))
                    pipeline.settle(Stages(lambda stage: None))
                    found.append(batch)
                    position = batch.position
                    version = writer.version = writer.version + 1
                place = self.folder / str(len(found))
                if pipeline.ahead is not None:
                    save_rollouts(place / "rollouts", pipeline.ahead)
                save_backlog(place / "backlog", pipeline.backlog)
            ahead = load_rollouts(place / "rollouts", prompt_at)
            backlog = load_backlog(place / "backlog", prompt_at)
        assert backlog == found[-1].backlog != NOTHING  # for a run that is made longer
        return found


@pytest.mark.parametrize("kind", [Serial, OneStepOff])
def test_a_resumed_run_takes_the_same_batches(tmp_path: Path, kind: type[Serial] | type[OneStepOff]) -> None:
    """Stopped after every iteration, with nothing but what a checkpoint holds."""
    whole, stopped = (
        [(b.groups, b.position, measured(b)) for b in Pipelines(tmp_path / name, kind).run(5, stops)]
        for name, stops in (("whole", False), ("stopped", True))
    )
    assert stopped == whole
    versions = {
        c.versions for groups, _, _ in whole for g in groups for c in (r.completion for r in g.rollouts)
    }
    assert any(len(set(own)) > 1 for own in versions)


def measured(batch: RolloutBatch) -> dict[str, float]:
    return {name: value for name, value in batch.metrics.items() if not name.startswith("time/")}


@pytest.mark.parametrize("routed", [False, True])
def test_a_stored_backlog_comes_back_as_it_was(tmp_path: Path, routed: bool) -> None:
    def response(length: int, reason: str) -> Completion:
        routes = np.full((2 + length, 3, 2), length, np.int16) if routed else None
        logp = tuple(np.log(np.arange(1, length + 1, dtype=np.float32) / 9).tolist())
        return Completion(tuple(range(length)), logp, reason, tuple(range(length)), routes)

    scored = group(rollout(1.0), rollout(0.5, truncated=True), position=3)
    if routed:
        scored = replace(
            scored,
            rollouts=tuple(Rollout(response(2 + k, "stop"), r.score) for k, r in enumerate(scored.rollouts)),
        )
    backlog = Backlog(
        (
            PartialGroup(prompt_at(7), (response(4, UNFINISHED), response(2, "stop"))),
            PartialGroup(prompt_at(9), (response(1, UNFINISHED), response(5, UNFINISHED))),
        ),
        (scored,),
    )
    save_backlog(tmp_path / "backlog", backlog)
    found = load_backlog(tmp_path / "backlog", prompt_at)
    assert found == backlog
    for ours, theirs in zip(found.under_way, backlog.under_way, strict=True):
        for one, other in zip(ours.completions, theirs.completions, strict=True):
            assert (one.routes is not None) == routed and np.array_equal(one.routes, other.routes)
    assert load_backlog(tmp_path / "none", prompt_at) == NOTHING
    (tmp_path / "backlog" / "rollouts.json").write_text('{"groups": [], "scores": []}')
    with pytest.raises(DataError, match=r"rollouts\.json lacks prompts, finish_reasons: another version"):
        load_backlog(tmp_path / "backlog", prompt_at)
    assert str(backlog) == (
        "3 responses of 2 groups are not finished (12 tokens in these groups), and 1 complete groups wait for a batch"
    )


def test_rounds_of_parts_count_as_parts_of_rounds() -> None:
    """As many whole responses as without a budget are judged before a run is given up."""
    writer = Writer(algorithm_of(2, needed=2, max_rounds=2), stops=99)
    writer.score = lambda prompts, own: [  # type: ignore[method-assign]
        Group(p, tuple(Rollout(c, Score.of(False)) for c in cs)) for p, cs in zip(prompts, own, strict=True)
    ]
    with pytest.raises(TooFewGroups, match=r"0 groups kept, 2 needed, after 8 rounds \(4 drawn"):
        collect(writer, 0, NOTHING, STAGES)


def test_the_large_recipe_takes_a_budget() -> None:
    budget = ["+recipe=minite", "algorithm.partial_rollouts.token_budget=4096"]
    algorithm = load_config([*budget, "algorithm.max_staleness=7"]).algorithm
    assert (algorithm.parts, algorithm.oldest) == (5, 7)
    assert load_config(["+recipe=minite"]).algorithm.parts == 1
    with pytest.raises(ConfigError, match=r"algorithm\.max_staleness=1: at least 7"):
        load_config(budget)


@pytest.mark.parametrize(
    ("changes", "least", "named"),
    [
        ({}, 3, "algorithm.max_staleness=2: at least 3 .*token_budget=3.* up to 3 iterations.* in 1 more"),
        ({"pipeline": "one_step_off"}, 4, "at least 4 with algorithm.pipeline=one_step_off"),
        ({"prompts_per_round": 7}, 5, "at least 5 .* in 3 more"),
    ],
)
def test_a_bound_on_staleness_that_long_responses_break_is_refused(
    changes: dict[str, Any], least: int, named: str
) -> None:
    assert algorithm_of(3, **changes, max_staleness=least).oldest == least
    with pytest.raises(ValueError, match=named):
        algorithm_of(3, **changes, max_staleness=least - 1)
    with pytest.raises(ValueError, match=r"algorithm\.partial_rollouts\.token_budget=0: at least 1"):
        algorithm_of(0)

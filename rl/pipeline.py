"""When responses are sampled: before each update, or for the next update while the learner works on this one.

One step off (Noukhovitch et al. 2024, arXiv 2410.18252): the batch of iteration i + 1 is drawn while iteration i
scores and updates, by the weights that iteration i began with. It is whole before the weights change, so every response
is of one version, and one version old when it is learned from; the first batch of a run is not old. The importance
weights from sampler to learner (`learner.correction`) cover the difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from rl.errors import UserError
from rl.groups import TooFewGroups
from rl.rollout import Group
from rl.stages import Stages


@dataclass(frozen=True)
class RolloutBatch:
    """Groups to learn from, the data cursor after them, and statistics of everything that was drawn."""

    groups: list[Group]
    position: int
    metrics: dict[str, float]


Collect = Callable[[int, Stages], RolloutBatch]


class StaleRollouts(UserError):
    """Responses of weights that are older than allowed."""


class Pipeline(Protocol):
    """Where the driver takes its rollouts from; a context manager."""

    def take(self, position: int, stages: Stages) -> RolloutBatch:
        """The batch at the data cursor. Raises what drawing it raised, TooFewGroups above all."""

    def settle(self, stages: Stages) -> None:
        """Wait until no sampler is at work: then weights may be sent."""

    @property
    def ahead(self) -> RolloutBatch | None:
        """What is drawn and not yet taken, after `settle`: it belongs into a checkpoint."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def open_pipeline(
    kind: Literal["serial", "one_step_off"], collect: Collect, batches: int, ahead: RolloutBatch | None
) -> Pipeline:
    """collect: draws a batch at a data cursor. batches: how many the run still takes; none is drawn beyond. ahead: what
    a checkpoint held.
    """
    return OneStepOff(collect, batches, ahead) if kind == "one_step_off" else Serial(collect)


class Serial:
    """Sampler and learner take turns."""

    ahead = None

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def take(self, position: int, stages: Stages) -> RolloutBatch:
        return self._collect(position, stages)

    def settle(self, stages: Stages) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class OneStepOff:
    """Draws the next batch in a thread as soon as one is taken."""

    def __init__(self, collect: Collect, batches: int, ahead: RolloutBatch | None = None) -> None:
        self._collect = collect
        self._left = batches
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._closed = False
        self._next: Future[RolloutBatch] | None = None
        if ahead is not None:
            self._next = Future()
            self._next.set_result(ahead)

    def take(self, position: int, stages: Stages) -> RolloutBatch:
        drawn, self._next = self._next, None
        batch = drawn.result() if drawn else self._collect(position, stages)
        self._left -= 1
        if self._left:
            self._next = self._thread.submit(self._draw, batch.position)
        return batch

    def settle(self, stages: Stages) -> None:
        """Raises what drawing the next batch raised; only a shortage of groups waits until that batch is taken."""
        if self._next is None:
            return
        with stages("generate"):
            wait_for([self._next])
        error = self._next.exception()
        if error is not None and not isinstance(error, TooFewGroups):
            raise error

    @property
    def ahead(self) -> RolloutBatch | None:
        if self._next is None or self._next.exception() is not None:
            return None
        return self._next.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the round of sampling that is under way; no other begins."""
        self._closed = True
        self._thread.shutdown()

    def _draw(self, position: int) -> RolloutBatch:
        started = time.perf_counter()
        batch = self._collect(position, Stages(self._begin))
        behind = {"time/overlapped": time.perf_counter() - started}
        return replace(batch, metrics=batch.metrics | behind)

    def _begin(self, stage: str) -> None:
        if self._closed:
            raise RuntimeError(f"the run is over: {stage} is not begun")


def staleness(groups: Sequence[Group], version: int, bound: int) -> dict[str, float]:
    """How many weight versions the response tokens are behind the learner's `version`.

    staleness/mean, staleness/max: over tokens; version/weights: the oldest. Raises StaleRollouts beyond `bound`.
    """
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    ages = [version - completion.version for completion in completions]
    if not 0 <= min(ages) <= max(ages) <= bound:
        raise StaleRollouts(
            f"responses were written by weights version {version - max(ages)} to {version - min(ages)}, and the learner"
            f" holds version {version}: algorithm.max_staleness={bound} is the most that they may be behind"
        )
    tokens = [len(completion.token_ids) for completion in completions]
    behind = sum(age * count for age, count in zip(ages, tokens, strict=True))
    return {
        "staleness/mean": behind / sum(tokens),
        "staleness/max": max(ages),
        "version/weights": version - max(ages),
    }

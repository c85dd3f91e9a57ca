"""When responses are sampled: before each update, or for the next update while the learner works on this one.

One step off (Noukhovitch et al. 2024, arXiv 2410.18252): the batch of iteration i + 1 is drawn while iteration i
scores and updates, by the weights that iteration i began with. It is whole before the weights change, so what is
written for it is of one version, and one version old when it is learned from; the first batch of a run is not old. The
importance weights from sampler to learner (`learner.correction`) cover the difference.

Responses may have begun in earlier batches (`rl.partial`): what one batch puts aside the next one goes on with.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from rl.errors import UserError
from rl.groups import TooFewGroups
from rl.partial import NOTHING, Backlog
from rl.rollout import Group
from rl.stages import Stages


@dataclass(frozen=True)
class RolloutBatch:
    """Groups to learn from, the data cursor after them, statistics of everything that was drawn, and what was put aside
    behind them.
    """

    groups: list[Group]
    position: int
    metrics: dict[str, float]
    backlog: Backlog = NOTHING


Collect = Callable[[int, Backlog, Stages], RolloutBatch]


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

    @property
    def backlog(self) -> Backlog:
        """What is put aside behind all that is drawn, after `settle`: it belongs into a checkpoint, too."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def open_pipeline(
    kind: Literal["serial", "one_step_off"],
    collect: Collect,
    batches: int,
    ahead: RolloutBatch | None = None,
    backlog: Backlog = NOTHING,
) -> Pipeline:
    """collect: draws a batch at a data cursor, with what was put aside. batches: how many the run still takes; none is
    drawn beyond. ahead, backlog: what a checkpoint held.
    """
    if kind == "one_step_off":
        return OneStepOff(collect, batches, ahead, backlog)
    return Serial(collect, backlog)


class Serial:
    """Sampler and learner take turns."""

    ahead = None

    def __init__(self, collect: Collect, backlog: Backlog = NOTHING) -> None:
        self._collect = collect
        self.backlog = backlog

    def take(self, position: int, stages: Stages) -> RolloutBatch:
        batch = self._collect(position, self.backlog, stages)
        self.backlog = batch.backlog
        return batch

    def settle(self, stages: Stages) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class OneStepOff:
    """Draws the next batch in a thread as soon as one is taken."""

    def __init__(
        self,
        collect: Collect,
        batches: int,
        ahead: RolloutBatch | None = None,
        backlog: Backlog = NOTHING,
    ) -> None:
        self._collect = collect
        self._backlog = backlog  # behind the batch that was taken last
        self._left = batches
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._closed = False
        self._next: Future[RolloutBatch] | None = None
        if ahead is not None:
            self._next = Future()
            self._next.set_result(replace(ahead, backlog=backlog))

    def take(self, position: int, stages: Stages) -> RolloutBatch:
        drawn, self._next = self._next, None
        batch = drawn.result() if drawn else self._collect(position, self._backlog, stages)
        self._backlog = batch.backlog
        self._left -= 1
        if self._left:
            self._next = self._thread.submit(self._draw, batch.position, batch.backlog)
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

    @property
    def backlog(self) -> Backlog:
        return self._backlog if self.ahead is None else self.ahead.backlog

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the round of sampling that is under way; no other begins."""
        self._closed = True
        self._thread.shutdown()

    def _draw(self, position: int, backlog: Backlog) -> RolloutBatch:
        started = time.perf_counter()
        batch = self._collect(position, backlog, Stages(self._begin))
        behind = {"time/overlapped": time.perf_counter() - started}
        return replace(batch, metrics=batch.metrics | behind)

    def _begin(self, stage: str) -> None:
        if self._closed:
            raise RuntimeError(f"the run is over: {stage} is not begun")


def staleness(groups: Sequence[Group], version: int, bound: int) -> dict[str, float]:
    """How many weight versions the response tokens are behind the learner's `version`.

    staleness/mean, staleness/max: over tokens; staleness/older_tokens: share of the tokens by other weights than the
    newest that wrote any; version/weights: the oldest. Raises StaleRollouts beyond `bound`.
    """
    count = Counter[int]()
    for group in groups:
        for rollout in group.rollouts:
            count.update(rollout.completion.versions)
    oldest, newest, tokens = min(count), max(count), count.total()
    if not 0 <= version - newest <= version - oldest <= bound:
        raise StaleRollouts(
            f"responses were written by weights version {oldest} to {newest}, and the learner"
            f" holds version {version}: algorithm.max_staleness={bound} is the most that they may be behind"
        )
    return {
        "staleness/mean": sum((version - own) * of_it for own, of_it in count.items()) / tokens,
        "staleness/max": version - oldest,
        "staleness/older_tokens": (tokens - count[newest]) / tokens,
        "version/weights": oldest,
    }

"""The samplers of a run and the weight sync that serves them. A sampler that dies is started again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kernels.report import EngineReport
from rl.cluster import ActorDied, Remote, stop_actor, wait
from rl.group import Group
from rl.sync.weight_sync import NoSamplerLeft

log = logging.getLogger(__name__)


class Fleet:
    """samplers: one weight version in all of them, whenever anybody asks them for something.

    A sampler may have several processes: the death of one is its death. weight_sync: the actor. start: makes the
    sampler of a number (and returns before it is ready). restarts: how many deaths a run may see. sleeps: whether
    samplers sleep while they rest. leaving: learners that give their GPU memory to the samplers while these are at
    work.
    """

    def __init__(
        self,
        samplers: list[Remote | Group],
        weight_sync: Remote,
        start: Callable[[int], Remote | Group],
        restarts: int,
        sleeps: bool = False,
        leaving: Sequence[Remote | Group] = (),
    ) -> None:
        self.samplers = samplers
        self._weight_sync, self._start = weight_sync, start
        self._restarts_left = self._restarts = restarts
        self._sleeps, self._asleep = sleeps, False
        self._leaving, self._left = leaving, False

    @property
    def restarts(self) -> int:
        """How many samplers have been started again."""
        return self._restarts - self._restarts_left

    def rest(self) -> None:
        """Until the next sync nobody asks the samplers for anything: they may give their memory to the learner."""
        if self._sleeps and not self._asleep:
            self._asleep = True
            self._each("sleep")
        if self._left:
            for learner in self._leaving:
                learner.onload()
            self._left = False

    def sync(self, version: int) -> dict[str, Any]:
        """Bring every sampler to the learner's weights, as `version`; the metrics. See `rl.sync.weight_sync`.

        Samplers that rest are woken, the weights before the sync, the cache when it is over and learners have left.
        Where all have died before one held the version, it is sent to their successors.
        """
        if self._asleep:
            self._each("wake_weights")
        while True:
            try:
                metrics: dict[str, Any] = self._weight_sync.sync(version)
                break
            except NoSamplerLeft:
                self._start_anew(version)
        if self._leaving:
            left = [learner.offload() for learner in self._leaving]
            self._left = True
            metrics["memory/gpu_offloaded"] = max(left) / 2**20
        if self._asleep:
            self._asleep = False
            self._each("wake_cache", without=self._weight_sync.lost())
        for index in self._weight_sync.lost():
            self._replace(index, _death_in_sync(index, version), self._weight_sync.rejoin)
        return metrics

    def generate(self, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`Sampler.generate` of each sampler with its share (prompts, seeds, sampling, limits), all at once.

        The share of a sampler that dies is generated again by its successor: a response is a function of the weights
        and the arguments.
        """
        started = [
            sampler.later.generate(*share) if share[0] else None
            for sampler, share in zip(self.samplers, shares, strict=True)
        ]
        return [
            [] if call is None else self._answer(index, call, shares[index])
            for index, call in enumerate(started)
        ]

    def ask(self, index: int, *share: Any) -> Any:
        """`Sampler.generate` of one sampler."""
        return self._answer(index, self.samplers[index].later.generate(*share), share)

    def report(self) -> EngineReport:
        report: EngineReport = self._weight_sync.report()
        return report

    def memory_mib(self) -> float:
        """Of the weight sync's process."""
        return float(self._weight_sync.memory_mib())

    def _each(self, method: str, without: Sequence[int] = ()) -> None:
        """Of all samplers at once. One that has died is found and replaced when it is next needed."""
        calls = [
            (sampler, getattr(sampler.later, method)())
            for index, sampler in enumerate(self.samplers)
            if index not in without
        ]
        for sampler, call in calls:
            try:
                _outcome(sampler, call)
            except ActorDied as died:
                log.warning("%s: %s", method, died)

    def _answer(self, index: int, call: Any, share: tuple[Any, ...]) -> Any:
        while True:
            try:
                return _outcome(self.samplers[index], call)
            except ActorDied as died:
                self._replace(index, died, self._weight_sync.rejoin)
                call = self.samplers[index].later.generate(*share)

    def _start_anew(self, version: int) -> None:
        """All samplers have died in the sync of `version`: their successors are put where they were before it.

        These start while the learners have left, as there may not be room for both, and sleep when they come back.
        """

        def put(index: int, sampler: Remote | Group) -> None:
            if self._asleep:
                sampler.sleep()
            self._weight_sync.take(index, sampler)

        for learner in self._leaving:
            learner.offload()
        for index in self._weight_sync.lost():
            self._replace(index, _death_in_sync(index, version), put)
        for learner in self._leaving:
            learner.onload()
        if self._asleep:
            self._each("wake_weights")

    def _replace(self, index: int, died: ActorDied, welcome: Callable[[int, Remote | Group], None]) -> None:
        """Start sampler `index` again; `welcome`, with its number and itself, puts it where it belongs, and may fail as
        it does. Raises ActorDied, from `died`, when that is one too many.
        """
        while True:
            if not self._restarts_left:
                raise ActorDied(f"{died} (sync.restarts={self._restarts}: no more restarts)") from died
            self._restarts_left -= 1
            log.warning("sampler %d died and is started again (%d restarts left)", index, self._restarts_left)
            try:
                _end(self.samplers[index])
                self.samplers[index] = self._start(index)
                self.samplers[index].ready()
                welcome(index, self.samplers[index])
                return
            except ActorDied as again:
                died = again


def _death_in_sync(index: int, version: int) -> ActorDied:
    return ActorDied(f"sampler {index} died in the weight sync of version {version}")


def _outcome(sampler: Remote | Group, call: Any) -> Any:
    """The result of `call`, which `sampler.later` gave."""
    return sampler.answer(call) if isinstance(sampler, Group) else wait(call)


def _end(sampler: Remote | Group) -> None:
    """Of one that has died: the processes that are left wait for it, or would."""
    if isinstance(sampler, Group):
        stop_actor(sampler)

"""The samplers of a run and the weight sync that serves them. A sampler that dies is started again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kernels.report import EngineReport
from rl.actor_group import ActorGroup, members_of
from rl.cluster import Remote, stop_actor, wait
from rl.deaths import ActorDied
from rl.sync.weight_sync import NoSamplerLeft, SamplerLost

log = logging.getLogger(__name__)

_AT = {"generate": "while it wrote responses"}  # what a sampler is at in a call


class Fleet:
    """samplers: one weight version in all of them, whenever anybody asks them for something.

    A sampler may have several processes: the death of one is its death. weight_sync: the actor. start: makes the
    sampler of a number (and returns before it is ready). restarts: how many deaths a run may see. sleeps: whether
    samplers sleep while they rest. leaving: learners that give their GPU memory to the samplers while these are at
    work.
    """

    def __init__(
        self,
        samplers: list[Remote | ActorGroup],
        weight_sync: Remote,
        start: Callable[[int], Remote | ActorGroup],
        restarts: int,
        sleeps: bool = False,
        leaving: Sequence[Remote | ActorGroup] = (),
    ) -> None:
        self.samplers = samplers
        self._weight_sync, self._start = weight_sync, start
        self._restarts_left = self._restarts = restarts
        self._sleeps, self._asleep = sleeps, False
        self._leaving, self._left = leaving, False
        self._unused: set[int] = set()  # successors that have not written anything yet
        self._synced = False  # whether there is a version that a successor must be brought to

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
                self._synced = True
                break
            except NoSamplerLeft:
                self._start_anew()
        if self._leaving:
            left = [learner.offload() for learner in self._leaving]
            self._left = True
            metrics["memory/gpu_offloaded"] = max(left) / 2**20
        if self._asleep:
            self._asleep = False
            self._each("wake_cache", without=self._weight_sync.lost())
        for index, died in self._weight_sync.lost().items():
            self._replace(index, died)
        return metrics

    def generate(self, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`Sampler.generate` of each sampler with its share (prompts, seeds, sampling, limits), all at once.

        The share of a sampler that dies is generated again by its successor: a response is a function of the weights
        and the arguments.
        """
        found = self._answers("generate", {index: share for index, share in enumerate(shares) if share[0]})
        return [found.get(index, []) for index in range(len(shares))]

    def ask(self, index: int, *share: Any) -> Any:
        """`Sampler.generate` of one sampler."""
        return self._answers("generate", {index: share})[index]

    def from_each(self, method: str) -> list[Any]:
        """What every sampler answers to `method`. The successor answers for one that has died."""
        return list(self._answers(method, {index: () for index in range(len(self.samplers))}).values())

    def from_those_at_work(self, method: str) -> list[Any]:
        """The same of those that have neither died nor been started in vain: for the end of a run, where nobody who has
        died is needed again.
        """
        return self._alive(method, [(i, own) for i, own in enumerate(self.samplers) if i not in self._unused])

    def largest(self, measure: str) -> float | None:
        """What the method `measure` gives, of all processes of samplers that have not died; None when all have.
        These are replaced when they are next needed.
        """
        processes = [(i, member) for i, sampler in enumerate(self.samplers) for member in members_of(sampler)]
        return max(self._alive(measure, processes), default=None)

    def report(self) -> EngineReport:
        report: EngineReport = self._weight_sync.report()
        return report

    def memory_mib(self) -> float:
        """Of the weight sync's process."""
        return float(self._weight_sync.memory_mib())

    def _each(self, method: str, without: Collection[int] = ()) -> None:
        """Of all samplers at once. One that has died is found and replaced when it is next needed."""
        self._alive(method, [(i, sampler) for i, sampler in enumerate(self.samplers) if i not in without])

    def _alive(self, method: str, asked: Sequence[tuple[int, Remote | ActorGroup]]) -> list[Any]:
        """What these samplers, or processes of them, answer, all asked at once; the dead are left out."""
        calls = [(index, sampler, getattr(sampler.later, method)()) for index, sampler in asked]
        answers = []
        for index, sampler, call in calls:
            try:
                answers.append(_outcome(sampler, call))
            except ActorDied as died:
                log.warning("%s; it is missed in %s", _said(index, died), method)
        return answers

    def _begin(self, method: str, asked: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Ask the samplers of these numbers, each with its arguments."""
        if method == "generate":
            self._unused -= asked.keys()
        return {
            index: getattr(self.samplers[index].later, method)(*arguments)
            for index, arguments in asked.items()
        }

    def _answers(self, method: str, asked: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        calls = self._begin(method, asked)  # of all at once
        return {index: self._answer(index, call, method, asked[index]) for index, call in calls.items()}

    def _answer(self, index: int, call: Any, method: str, arguments: tuple[Any, ...]) -> Any:
        while True:
            try:
                return _outcome(self.samplers[index], call)
            except ActorDied as died:
                self._replace(index, _said(index, died, _AT.get(method, f"in {method}")))
                [call] = self._begin(method, {index: arguments}).values()

    def _start_anew(self) -> None:
        """All samplers have died in a sync: their successors are put where they were before it.

        These start while the learners have left, as there may not be room for both, and sleep when they come back.
        """
        for learner in self._leaving:
            learner.offload()
        for index, died in self._weight_sync.lost().items():
            self._replace(index, died, to_sync=True)
        for learner in self._leaving:
            learner.onload()
        if self._asleep:
            self._each("wake_weights")

    def _replace(self, index: int, died: ActorDied, to_sync: bool = False) -> None:
        """Start sampler `index` again and bring it to the version of the others. to_sync: a sync will do that.

        Raises ActorDied, from `died`, when that is one too many, or when the learner has died.
        """
        welcome = self._weight_sync.take if to_sync or not self._synced else self._weight_sync.rejoin
        while True:
            if not self._restarts_left:
                raise died.said(more=f"sync.restarts={self._restarts}: no more restarts") from died
            self._restarts_left -= 1
            log.warning("%s; started again, %d more restarts", died, self._restarts_left)
            try:
                self._start_again(index)
                welcome(index, self.samplers[index])
                return
            except SamplerLost as lost:
                died = lost.died

    def _start_again(self, index: int) -> None:
        """Until it is there, and asleep where the others are. Raises SamplerLost."""
        _end(self.samplers[index])
        try:
            self.samplers[index] = self._start(index)
            self._unused.add(index)
            self.samplers[index].ready()
            if self._asleep:
                self.samplers[index].sleep()
        except ActorDied as died:
            raise SamplerLost(index, _said(index, died)) from died


def _said(index: int, died: ActorDied, at: str = "") -> ActorDied:
    return died.said(f"sampler {index}", at)


def _outcome(sampler: Remote | ActorGroup, call: Any) -> Any:
    """The result of `call`, which `sampler.later` gave."""
    return sampler.answer(call) if isinstance(sampler, ActorGroup) else wait(call)


def _end(sampler: Remote | ActorGroup) -> None:
    """Of one that has died: the processes that are left wait for it, or would."""
    if isinstance(sampler, ActorGroup):
        stop_actor(sampler)

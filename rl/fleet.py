"""The samplers of a run and the weight sync that serves them. A sampler that dies is started again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kernels.report import EngineReport
from rl.cluster import ActorDied, Remote, stop_actor, wait
from rl.group import Group, members_of
from rl.sync.weight_sync import NoSamplerLeft

log = logging.getLogger(__name__)

Welcome = Callable[[int, Remote | Group], None]  # given a successor, by its number; may fail as that does


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
                self._start_anew(version)
        if self._leaving:
            left = [learner.offload() for learner in self._leaving]
            self._left = True
            metrics["memory/gpu_offloaded"] = max(left) / 2**20
        if self._asleep:
            self._asleep = False
            self._each("wake_cache", without=self._weight_sync.lost())
        for index in self._weight_sync.lost():
            self._replace(index, _death_in_sync(index, version))
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
        return self._alive(
            method, [own for index, own in enumerate(self.samplers) if index not in self._unused]
        )

    def largest(self, measure: str) -> float | None:
        """What the method `measure` gives, of all processes of samplers that have not died; None when all have.
        These are replaced when they are next needed.
        """
        members = [member for sampler in self.samplers for member in members_of(sampler)]
        return max(self._alive(measure, members), default=None)

    def report(self) -> EngineReport:
        report: EngineReport = self._weight_sync.report()
        return report

    def memory_mib(self) -> float:
        """Of the weight sync's process."""
        return float(self._weight_sync.memory_mib())

    def _each(self, method: str, without: Sequence[int] = ()) -> None:
        """Of all samplers at once. One that has died is found and replaced when it is next needed."""
        self._alive(method, [sampler for index, sampler in enumerate(self.samplers) if index not in without])

    def _alive(self, method: str, asked: Sequence[Remote | Group]) -> list[Any]:
        """What these answer, all asked at once, but for those that have died."""
        calls = [(sampler, getattr(sampler.later, method)()) for sampler in asked]
        answers = []
        for sampler, call in calls:
            try:
                answers.append(_outcome(sampler, call))
            except ActorDied as died:
                log.warning("%s: %s", method, died)
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
                self._replace(index, died)
                [call] = self._begin(method, {index: arguments}).values()

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

    def _replace(self, index: int, died: ActorDied, welcome: Welcome | None = None) -> None:
        """Start sampler `index` again, and bring it to the version of the others, or to where `welcome` brings it.

        Raises ActorDied, from `died`, when that is one too many.
        """
        welcome = welcome or (self._weight_sync.rejoin if self._synced else self._weight_sync.take)
        while True:
            if not self._restarts_left:
                raise ActorDied(f"{died} (sync.restarts={self._restarts}: no more restarts)") from died
            self._restarts_left -= 1
            log.warning("sampler %d died and is started again (%d restarts left)", index, self._restarts_left)
            try:
                _end(self.samplers[index])
                self.samplers[index] = self._start(index)
                self._unused.add(index)
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

"""The processes that share one model, as if they were one actor.

    group = start_group(LearnerActor, "learner", config.learner, log, *arguments)
    scores = group.score(...)       # all ranks work, rank 0 answers
    call = group.later.ship()       # the reference of rank 0's answer
    group.answer(call)              # that answer, once all have answered

What is marked `rl.actors.collective` is called on all ranks, with the same arguments and in the same order; anything
else on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from learner.errors import OtherRankFailed
from rl.cluster import Remote, free_port, start_actor, wait
from rl.deaths import ActorDied
from rl.placement import Place

_PATIENCE_S = 20.0  # after an error on one rank, for that on which it rests
_DEATH_S = 5.0  # after an error on one rank, for word of the death of another


class Processes(Protocol):
    """Of a configuration: how many processes share the model, and threads of the tensor operations of each."""

    @property
    def processes(self) -> int: ...

    @property
    def threads(self) -> int: ...


def start_group(
    actor_class: type,
    name: str,
    config: Processes,
    folder: Path,
    *args: Any,
    places: Sequence[Place] = (),
) -> Remote | ActorGroup:
    """Begin to start the processes that `config` asks for; with one process, a plain actor. Logs go to `folder`.

    places: by rank; without any all are on this machine, and see all its GPUs. Rank 0's node is where they meet. Raises
    OSError when that has no free port.
    """
    places = places or [Place(local_rank=rank) for rank in range(config.processes)]
    first = places[0].node
    if config.processes == 1:
        log = folder / f"{name}.log"
        return start_actor(actor_class, name, config.threads, log, *args, place=places[0])
    meeting = {"MASTER_ADDR": first.address, "MASTER_PORT": str(free_port(first))}
    members = []
    for rank, place in enumerate(places):
        own = f"{name}.{rank}" if rank else name
        environment = {
            "WORLD_SIZE": str(config.processes),
            "RANK": str(rank),
            "LOCAL_RANK": str(place.local_rank),
        }
        members.append(
            start_actor(
                actor_class,
                own,
                config.threads,
                folder / f"{own}.log",
                *args,
                place=place,
                environment=meeting | environment,
            )
        )
    return ActorGroup(
        members, frozenset(n for n in dir(actor_class) if hasattr(getattr(actor_class, n), "collective"))
    )


class ActorGroup:
    """members: the actors, by rank; collective: the methods that all must call together."""

    def __init__(self, members: Sequence[Remote], collective: frozenset[str]) -> None:
        self.members, self.collective = list(members), collective
        self.later = _Later(self)
        self._unseen: list[Any] = []  # what other ranks have been asked by way of `later`

    def answer(self, call: Any) -> Any:
        """Rank 0's answer to `call`, which `later` gave, once all ranks have answered. Raises ActorDied for a death,
        also where others only say that they have lost one of them.
        """
        unseen, self._unseen = self._unseen, []
        try:
            return _answer([call], unseen)
        except ActorDied:
            raise
        except Exception:
            _raise_death(self.members)
            raise

    def begin(self, method: str, args: Any, kwargs: Any) -> list[Any]:
        """References of all calls, that of rank 0 first."""
        first, *others = self.members
        if method not in self.collective:
            return [getattr(first.later, method)(*args, **kwargs)]
        shared = [_put(arg) for arg in args]
        references = [getattr(first.later, method)(*shared, **kwargs)]
        return references + [other.later.silently(method, *shared, **kwargs) for other in others]

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            references = self.begin(method, args, kwargs)
            unseen, self._unseen = self._unseen, []
            return _answer(references, unseen, method)

        return call

    def __reduce__(self) -> Any:
        return (ActorGroup, (self.members, self.collective))


def members_of(engine: Remote | ActorGroup) -> list[Remote]:
    """Its processes, by rank."""
    return engine.members if isinstance(engine, ActorGroup) else [engine]


def largest(engines: Sequence[Remote | ActorGroup], measure: str) -> float:
    """What the method `measure` gives, of all processes of all `engines`."""
    members = [member for engine in engines for member in members_of(engine)]
    return max(wait([getattr(member.later, measure)() for member in members]))


def wait_until_ready(engines: Sequence[Remote | ActorGroup]) -> None:
    """Until every process of all engines is there; the first that fails ends the waiting."""
    _answer([member.later.ready() for engine in engines for member in members_of(engine)], [])


class _Later:
    def __init__(self, group: ActorGroup) -> None:
        self._group = group

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            first, *others = self._group.begin(method, args, kwargs)
            self._group._unseen += others
            return first

        return call


def _put(value: Any) -> Any:
    """Large arguments are stored once for all ranks."""
    import ray

    return value if isinstance(value, str | int | float | None | ray.ObjectRef) else ray.put(value)


def _answer(references: list[Any], others: list[Any], method: str = "") -> Any:
    """Rank 0's answer to `method`, once all have answered. The first error ends the waiting: other ranks may wait for
    the one that failed. An error that only says that another rank failed gives way to that one's own.
    """
    import ray

    pending, hearsay = [*references, *others], None
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=_PATIENCE_S if hearsay else None)
        if not done:
            break
        try:
            wait(done[0], method)
        except OtherRankFailed as error:
            hearsay = error
    if hearsay is not None:
        raise hearsay
    return wait(references[0]) if references else None


def _raise_death(members: Sequence[Remote]) -> None:
    """Raise ActorDied if one of them has died, which any call tells at once; those at work answer late or never."""
    import ray

    pending = [member.later.ready() for member in members]
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=_DEATH_S)
        if not done:
            return
        wait(done[0])

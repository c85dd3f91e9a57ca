"""A sampler that gives its memory to the learner while that works: the order of sleeping, waking and syncing.

    awake  --sleep-->  asleep  --wake_weights-->  weights  --wake_cache-->  awake

Only an engine that is awake generates. A sync may begin when the weights are there, awake or not yet: without the cache
there is room for what is staged. What does not fit this order is refused, and changes nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from rl.sync.protocol import ProtocolError
from rl.sync.receiver import Receiver


class Engine(Protocol):
    """What sleeps: `sampler.engine.Sampler`."""

    def sleep(self, keep: bool) -> None: ...
    def wake_weights(self) -> None: ...
    def wake_cache(self) -> None: ...


class Stage(StrEnum):
    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS = "weights"


class Rest:
    """An engine and its receiver, which sleep and wake together. All raise ProtocolError for what is not its turn.

    keep: whether the weights survive, in the host's memory. Without it they are gone, and a sync of whole tensors is
    needed after waking.
    """

    def __init__(self, engine: Engine, receiver: Receiver, keep: bool) -> None:
        self._engine, self._receiver, self._keep = engine, receiver, keep
        self.stage = Stage.AWAKE

    def sleep(self) -> None:
        self._require(Stage.AWAKE, "sleep")
        self._receiver.sleep(self._keep)
        self.stage = Stage.ASLEEP
        self._engine.sleep(self._keep)

    def wake_weights(self) -> None:
        self._require(Stage.ASLEEP, "wake_weights")
        self._engine.wake_weights()
        self._receiver.wake()
        self.stage = Stage.WEIGHTS

    def wake_cache(self) -> None:
        self._require(Stage.WEIGHTS, "wake_cache")
        self._receiver.require_no_sync("wake_cache")
        self._engine.wake_cache()
        self.stage = Stage.AWAKE

    def _require(self, stage: Stage, message: str) -> None:
        if self.stage is not stage:
            raise ProtocolError(f"{message} came to a sampler that is {self.stage}, it belongs to {stage}")

"""The actors of a run around small weights instead of engines, each in a process of its own."""

from __future__ import annotations

import os
import signal

import torch

from rl.actors import LearnerActor, SamplerActor
from rl.sync.receiver import Receiver
from rl.sync.transport import Parcel, RayInlet
from tests.rl.sync.worlds import Learner, Model, wanted


class SmallLearner(LearnerActor):
    def __init__(self) -> None:
        self.policy = SmallPolicy()  # type: ignore[assignment]

    def step(self) -> None:
        self.policy.step()  # type: ignore[attr-defined]

    def content(self) -> dict[str, torch.Tensor]:
        return wanted(self.policy)  # type: ignore[arg-type]


class SmallPolicy(Learner):
    device = torch.device("cpu")


class SmallSampler(SamplerActor):
    """deadly_chunk: the process ends when it has taken that many chunks."""

    def __init__(self, seed: int, deadly_chunk: int | None = None) -> None:
        self.receiver, self.inlet, self.device = Receiver(Model(seed)), RayInlet(), torch.device("cpu")
        self.left = deadly_chunk

    def doom(self, chunk: int) -> None:
        self.left = chunk

    def receive(self, parcel: Parcel) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        super().receive(parcel)

    def content(self) -> dict[str, torch.Tensor]:
        return self.receiver.holder.everything()  # type: ignore[attr-defined]

    def state(self) -> tuple[int, str | None, str | None]:
        held = self.receiver.held()
        return held.version, held.root, self.receiver.holder.closed

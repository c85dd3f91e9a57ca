"""A learner that says how much memory its processes take, and a sampler's receiving end without an engine: it holds
whatever a learner says that it sends.
"""

from __future__ import annotations

import torch

from kernels.experts import ExpertWeights, StoredLayout, derived_name, wire_name
from kernels.precision_map import PrecisionMap
from kernels.reference import prepare
from kernels.shard import NO_SHARDS, Shards
from rl.actors import LearnerActor, SamplerActor
from rl.sync.receiver import Receiver
from rl.sync.transport import RayInlet

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class OpenLearner(LearnerActor):
    def layout(self) -> Layout:
        return self.policy.export_layout()

    def memory_mib(self) -> float:
        """The later ranks are the larger ones."""
        return 100.0 + self.rank


class Holder:
    """An `rl.sync.receiver.Holder`."""

    def __init__(self, layout: Layout, precision_map: PrecisionMap) -> None:
        self.precision_map, self.layout, self.version = precision_map, StoredLayout.ROWS, 0
        self.closed: str | None = None
        self.shards: Shards = NO_SHARDS
        self.live = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.live

    def refresh(self) -> dict[str, torch.Tensor]:
        derived = {}
        for layer, spec in enumerate(self.precision_map.layers):
            prefix = wire_name(layer, "")
            own = {name.removeprefix(prefix): t for name, t in self.live.items() if name.startswith(prefix)}
            prepared = prepare(ExpertWeights.from_tensors(own, spec), spec)
            derived |= {derived_name(layer, part): tensor for part, tensor in prepared.derived().items()}
        return derived


class PlainSampler(SamplerActor):
    def __init__(self, layout: Layout, precision_map: PrecisionMap) -> None:
        self.holder = Holder(layout, precision_map)
        self.receiver, self.inlet = Receiver(self.holder), RayInlet()
        self.device = torch.device("cpu")

    def content(self) -> dict[str, torch.Tensor]:
        return self.holder.live

    def memory_mib(self) -> float:
        return 100.0

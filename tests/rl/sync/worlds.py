"""A learner's weights and a sampler's in plain tensors: experts under `minite` and `bf16`, and what is outside them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights, StoredLayout, derived_name, expert_layout, wire_name
from kernels.precision_map import PrecisionMap
from kernels.reference import prepare
from kernels.shard import NO_SHARDS, Shards
from rl.sync.protocol import Chunk, attest
from rl.sync.receiver import Receiver
from rl.sync.sender import Sender, Sent

EXPERTS = 2
WIDTHS = {
    StoredLayout.ROWS: (32, 16),
    StoredLayout.TILES: (128, 128),
}  # hidden, FFN; in tiles multiples of 128
MAP = PrecisionMap.resolve(2, named_spec("minite"), last_layers_bf16=1)
OUTSIDE = {"model.embed_tokens.weight": (7, 32), "model.norm.weight": (32,), "odd": (3,)}
Named = Iterator[tuple[str, torch.Tensor]]


class Learner:
    """An `rl.sync.sender.Source`, of a model that can stand in `layout`. step: every weight moves by about `size` of
    itself, one in `every`.
    """

    def __init__(self, seed: int = 0, layout: StoredLayout = StoredLayout.ROWS) -> None:
        self.hidden, self.ffn = WIDTHS[layout]
        self._generator = torch.Generator().manual_seed(seed)
        self.outside = {name: self._normal(*shape) for name, shape in OUTSIDE.items()}
        self.masters = [
            (self._normal(EXPERTS, 2 * self.ffn, self.hidden), self._normal(EXPERTS, self.hidden, self.ffn))
            for _ in MAP.layers
        ]
        self.quantised = 0

    def step(self, size: float = 1e-3, every: int = 10) -> None:
        for tensor in [*self.outside.values(), *(w for pair in self.masters for w in pair)]:
            hit = torch.rand(tensor.shape, generator=self._generator) < 1 / every
            tensor += hit * size * self._normal(*tensor.shape) * tensor.abs()

    def export_layout(
        self, precision_map: PrecisionMap, layout: StoredLayout = StoredLayout.ROWS
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        found = {name: (tuple(shape), torch.float32) for name, shape in OUTSIDE.items()}
        for layer, spec in enumerate(precision_map.layers):
            for part, entry in expert_layout(EXPERTS, self.hidden, self.ffn, spec, layout).items():
                found[wire_name(layer, part)] = entry
        return found

    def export(self, precision_map: PrecisionMap, layout: StoredLayout = StoredLayout.ROWS) -> Named:
        yield from self.outside.items()
        for layer, weights in enumerate(self._weights(precision_map, layout)):
            for part, tensor in weights.tensors().items():
                yield wire_name(layer, part), tensor

    def export_operands(self, precision_map: PrecisionMap) -> Named:
        yield from self.outside.items()
        for layer, masters in enumerate(self.masters):
            for part, tensor in zip(("w13", "w2"), masters, strict=True):
                yield wire_name(layer, f"{part}.weight"), tensor.bfloat16()

    def export_derived(self, precision_map: PrecisionMap, layout: StoredLayout = StoredLayout.ROWS) -> Named:
        for layer, weights in enumerate(self._weights(precision_map, layout)):
            for part, tensor in prepare(weights, weights.spec).derived().items():
                yield derived_name(layer, part), tensor

    def _weights(self, precision_map: PrecisionMap, layout: StoredLayout) -> Iterator[ExpertWeights]:
        for masters, spec in zip(self.masters, precision_map.layers, strict=True):
            yield ExpertWeights.quantize(*masters, spec).in_layout(layout)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)


class Model:
    """An `rl.sync.receiver.Holder` whose derived tensors are a cache, as in an engine. It starts with other weights."""

    precision_map = MAP

    def __init__(self, seed: int = 99, layout: StoredLayout = StoredLayout.ROWS) -> None:
        self.version, self.layout = 0, layout
        self.closed: str | None = None
        self.shards: Shards = NO_SHARDS
        start = Learner(seed, layout)
        self._live = {name: tensor.clone() for name, tensor in start.export(MAP, layout)}
        self.derived = self.refresh()

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._live

    def refresh(self) -> dict[str, torch.Tensor]:
        self.derived = {}
        for layer, spec in enumerate(MAP.layers):
            prefix = wire_name(layer, "")
            parts = {
                name.removeprefix(prefix): t for name, t in self._live.items() if name.startswith(prefix)
            }
            for part, tensor in prepare(ExpertWeights.from_tensors(parts, spec), spec).derived().items():
                self.derived[derived_name(layer, part)] = tensor
        return self.derived

    def everything(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in {**self._live, **self.derived}.items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)) for name, tensor in left.items()
    )


def wanted(learner: Learner, layout: StoredLayout = StoredLayout.ROWS) -> dict[str, torch.Tensor]:
    """What a sampler must hold, stored and derived."""
    exported = (*learner.export(MAP, layout), *learner.export_derived(MAP, layout))
    return {name: tensor.clone() for name, tensor in exported}


def copied(chunk: Chunk) -> Chunk:
    """As a transport delivers it: in memory of the receiver's own."""
    return Chunk(chunk.header, chunk.payload.clone())


def sync(sender: Sender, receiver: Receiver, version: int, codec: str = "packed", limit: int = 1000) -> Sent:
    """One whole sync, as a change of what is held where that is possible."""
    base = receiver.held().root if codec == "delta" and receiver.held().root == sender.kept_root else None
    said = sender.open(f"s{version}", version, codec, limit, base)
    receiver.begin(said)
    for _ in range(said.chunks):
        receiver.receive(copied(sender.chunk()))
    installed = receiver.end(said.session)
    sent = sender.close()
    attest(sent.digests, installed.digests, "the receiver", version)
    receiver.commit(said.session)
    return sent

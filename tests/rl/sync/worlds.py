"""A learner's weights and a sampler's in plain tensors: experts under `minite` and `bf16`, and what is outside them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights, derived_name, expert_layout, wire_name
from kernels.precision_map import PrecisionMap
from kernels.reference import prepare
from rl.sync.protocol import Chunk, attest
from rl.sync.receiver import Receiver
from rl.sync.sender import Sender, Sent

EXPERTS, HIDDEN, FFN = 2, 32, 16
MAP = PrecisionMap.resolve(2, named_spec("minite"), last_layers_bf16=1)
OUTSIDE = {"model.embed_tokens.weight": (7, 32), "model.norm.weight": (32,), "odd": (3,)}
Named = Iterator[tuple[str, torch.Tensor]]


class Learner:
    """An `rl.sync.sender.Source`. step: every weight moves by about `size` of itself, one in `every`."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.outside = {name: self._normal(*shape) for name, shape in OUTSIDE.items()}
        self.masters = [
            (self._normal(EXPERTS, 2 * FFN, HIDDEN), self._normal(EXPERTS, HIDDEN, FFN)) for _ in MAP.layers
        ]
        self.quantised = 0

    def step(self, size: float = 1e-3, every: int = 10) -> None:
        for tensor in [*self.outside.values(), *(w for pair in self.masters for w in pair)]:
            hit = torch.rand(tensor.shape, generator=self._generator) < 1 / every
            tensor += hit * size * self._normal(*tensor.shape) * tensor.abs()

    def export_layout(self, precision_map: PrecisionMap) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        layout = {name: (tuple(shape), torch.float32) for name, shape in OUTSIDE.items()}
        for layer, spec in enumerate(precision_map.layers):
            for part, entry in expert_layout(EXPERTS, HIDDEN, FFN, spec).items():
                layout[wire_name(layer, part)] = entry
        return layout

    def export(self, precision_map: PrecisionMap) -> Named:
        yield from self.outside.items()
        for layer, weights in enumerate(self._weights(precision_map)):
            for part, tensor in weights.tensors().items():
                yield wire_name(layer, part), tensor

    def export_operands(self, precision_map: PrecisionMap) -> Named:
        yield from self.outside.items()
        for layer, masters in enumerate(self.masters):
            for part, tensor in zip(("w13", "w2"), masters, strict=True):
                yield wire_name(layer, f"{part}.weight"), tensor.bfloat16()

    def export_derived(self, precision_map: PrecisionMap) -> Named:
        for layer, weights in enumerate(self._weights(precision_map)):
            for part, tensor in prepare(weights, weights.spec).derived().items():
                yield derived_name(layer, part), tensor

    def _weights(self, precision_map: PrecisionMap) -> Iterator[ExpertWeights]:
        for masters, spec in zip(self.masters, precision_map.layers, strict=True):
            yield ExpertWeights.quantize(*masters, spec)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)


class Model:
    """An `rl.sync.receiver.Holder` whose derived tensors are a cache, as in an engine. It starts with other weights."""

    precision_map = MAP

    def __init__(self, seed: int = 99) -> None:
        self.version = 0
        self.closed: str | None = None
        start = Learner(seed)
        self._live = {name: tensor.clone() for name, tensor in start.export(MAP)}
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


def wanted(learner: Learner) -> dict[str, torch.Tensor]:
    """What a sampler must hold, stored and derived."""
    return {name: t.clone() for name, t in (*learner.export(MAP), *learner.export_derived(MAP))}


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

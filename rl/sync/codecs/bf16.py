"""`bf16`: experts as the operands that they are quantised from, for an engine that quantises for itself.

An engine that implements the spec then holds the bytes that the learner's own quantisation gives, and is attested
against them. An engine with another quantiser is not: what it does is another spec; its gap is measured, not closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from kernels.experts import ExpertWeights, StoredLayout, operand_layout, split_wire_name, wire_name
from kernels.shard import NO_SHARDS, Shards
from kernels.spec import ExecutionSpec
from rl.sync.codecs.base import Encoded, Staged, check_whole, whole, write_whole
from rl.sync.protocol import Manifest, Piece, TensorSpec


class Bf16:
    name: ClassVar[str] = "bf16"
    operands: ClassVar[bool] = True

    def travels(self, held: Manifest, specs: Sequence[ExecutionSpec]) -> Manifest:
        wire: dict[str, TensorSpec] = {}
        experts: dict[int, dict[str, tuple[int, ...]]] = {}
        for name, spec in held.items():
            expert = split_wire_name(name)
            if expert is None:
                wire[name] = spec
            else:
                experts.setdefault(expert[0], {})[expert[1]] = spec.shape
        for layer, parts in experts.items():
            for part, (shape, dtype) in operand_layout(parts, specs[layer]).items():
                wire[wire_name(layer, part)] = TensorSpec(str(dtype).removeprefix("torch."), shape)
        return wire

    def encode(self, name: str, tensor: torch.Tensor, base: torch.Tensor | None) -> Encoded:
        return whole(name, tensor)

    def check(self, piece: Piece, content: torch.Tensor, spec: TensorSpec) -> None:
        check_whole(piece, spec)

    def install(
        self,
        staged: Staged,
        live: Mapping[str, torch.Tensor],
        specs: Sequence[ExecutionSpec],
        shards: Shards = NO_SHARDS,
    ) -> None:
        wire = self.travels({name: TensorSpec.of(tensor) for name, tensor in live.items()}, specs)
        layers: dict[int, dict[str, torch.Tensor]] = {}
        for name, (_, content) in staged.items():
            expert = split_wire_name(name)
            if expert is None:
                write_whole(content, live[name])
            else:
                spec = wire[name]
                layers.setdefault(expert[0], {})[expert[1]] = content.view(getattr(torch, spec.dtype)).view(
                    spec.shape
                )
        for layer, operands in layers.items():
            weights = ExpertWeights.quantize(operands["w13.weight"], operands["w2.weight"], specs[layer])
            held = StoredLayout.TILES if wire_name(layer, "w13.words") in live else StoredLayout.ROWS
            weights = weights.in_layout(held)
            for part, tensor in weights.tensors().items():
                live[wire_name(layer, part)].copy_(tensor)

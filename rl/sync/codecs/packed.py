"""`packed`: the very tensors that the receiver holds (packed codes, block scales, outer scales; others as they are)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from kernels.shard import NO_SHARDS, Shards
from kernels.spec import ExecutionSpec
from rl.sync.codecs.base import Encoded, Staged, check_whole, whole, write_whole
from rl.sync.protocol import Manifest, Piece, TensorSpec


class Packed:
    name: ClassVar[str] = "packed"
    operands: ClassVar[bool] = False

    def travels(self, held: Manifest, specs: Sequence[ExecutionSpec]) -> Manifest:
        return held

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
        for name, (_, content) in staged.items():
            write_whole(content, live[name])

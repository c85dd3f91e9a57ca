"""`delta`: of every tensor the bytes that changed since what the receiver holds, or all of it where that is less.

Encodings: `same` (no bytes), `gaps8:P` and `gaps16:P` (P changes, see `rl.sync.gaps`), `whole`. Without a base every
tensor is whole. Exact: bytes are replaced, nothing is added up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import ClassVar

import torch

from kernels.digest import byte_view
from kernels.shard import NO_SHARDS, Shard, Shards
from kernels.spec import ExecutionSpec
from rl.sync import gaps
from rl.sync.codecs.base import WHOLE, Encoded, Staged, check_whole, live_bytes, whole, write_whole
from rl.sync.protocol import Manifest, Piece, RefusedError, TensorSpec

SAME = "same"
_GAPS = re.compile(r"gaps(8|16):(\d+)")


class Delta:
    name: ClassVar[str] = "delta"
    operands: ClassVar[bool] = False

    def travels(self, held: Manifest, specs: Sequence[ExecutionSpec]) -> Manifest:
        return held

    def encode(self, name: str, tensor: torch.Tensor, base: torch.Tensor | None) -> Encoded:
        if base is None:
            return whole(name, tensor)
        new = byte_view(tensor)
        positions = gaps.changed_positions(byte_view(base), new)
        if not len(positions):
            return Piece(name, SAME, 0), new[:0]
        # Each change takes two bytes at least: no need to look at the gaps when that is too much already.
        if 2 * len(positions) >= new.numel():
            return whole(name, tensor)
        width, size = gaps.smallest_width(positions)
        if size >= new.numel():
            return whole(name, tensor)
        stream = gaps.encode(positions, new[positions], width)
        return Piece(name, f"gaps{width}:{len(positions)}", size), stream

    def check(self, piece: Piece, content: torch.Tensor, spec: TensorSpec) -> None:
        match = _GAPS.fullmatch(piece.encoding)
        if match is not None:
            try:
                gaps.decode(content, int(match[1]), int(match[2]), spec.nbytes)
            except ValueError as error:
                raise RefusedError(f"{piece.name}: {error}") from error
        elif piece.encoding == SAME:
            if piece.nbytes:
                raise RefusedError(f"{piece.name} is said to be the same and came with {piece.nbytes} bytes")
        else:
            check_whole(piece, spec)

    def install(
        self,
        staged: Staged,
        live: Mapping[str, torch.Tensor],
        specs: Sequence[ExecutionSpec],
        shards: Shards = NO_SHARDS,
    ) -> None:
        for name, (piece, content) in staged.items():
            match = _GAPS.fullmatch(piece.encoding)
            if match is not None:
                target, shard = live_bytes(live[name]), shards.get(name)
                shape = live[name].shape if shard is None else shard.whole(tuple(live[name].shape))
                size = live[name].element_size() * prod(shape)
                positions, values = gaps.decode(content, int(match[1]), int(match[2]), size)
                if shard is not None:
                    positions, values = _own_changes(positions, values, live[name], shard)
                target[positions] = values
            elif piece.encoding == WHOLE:
                write_whole(content, live[name])


def _own_changes(
    positions: torch.Tensor, values: torch.Tensor, live: torch.Tensor, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Changes of a whole tensor's bytes -> those of its part `live`, counted there. An index of dimension `shard.dim`
    is a run of bytes.
    """
    run = live.element_size() * prod(live.shape[shard.dim + 1 :])
    outer, within = positions // (shard.size * run), positions % (shard.size * run) - shard.start * run
    width = shard.length * run
    inside = (within >= 0) & (within < width)
    return (outer * width + within)[inside], values[inside]


def changed_bytes(piece: Piece, tensor: torch.Tensor) -> int:
    """How many bytes `piece` replaces in a tensor like `tensor`."""
    match = _GAPS.fullmatch(piece.encoding)
    if match is not None:
        return int(match[2])
    return 0 if piece.encoding == SAME else tensor.numel() * tensor.element_size()

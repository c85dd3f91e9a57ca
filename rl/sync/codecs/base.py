"""The interface of codecs, and the encoding that all of them share: the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch

from kernels.digest import byte_view
from kernels.shard import NO_SHARDS, Shard, Shards
from kernels.spec import ExecutionSpec
from rl.sync.protocol import Manifest, Piece, RefusedError, TensorSpec

WHOLE = "whole"  # the bytes of the tensor in row-major order

Staged = Mapping[str, tuple[Piece, torch.Tensor]]
Encoded = tuple[Piece, torch.Tensor]


class Codec(Protocol):
    """name: in the configuration. operands: whether experts travel before they are quantised."""

    name: ClassVar[str]
    operands: ClassVar[bool]

    def travels(self, held: Manifest, specs: Sequence[ExecutionSpec]) -> Manifest:
        """What travels to a receiver that is to hold `held`; specs: of the layers."""
        ...

    def encode(self, name: str, tensor: torch.Tensor, base: torch.Tensor | None) -> Encoded:
        """base: what the receiver holds under this name, if that is known."""
        ...

    def check(self, piece: Piece, content: torch.Tensor, spec: TensorSpec) -> None:
        """Raise RefusedError unless `content`, uint8 [bytes], is what `piece` says of a tensor like `spec`."""
        ...

    def install(
        self,
        staged: Staged,
        live: Mapping[str, torch.Tensor],
        specs: Sequence[ExecutionSpec],
        shards: Shards = NO_SHARDS,
    ) -> None:
        """Write everything that came, checked before, into the live tensors, in place. staged: of whole tensors the
        `own_part` alone. shards: which part of the tensors `live` are.
        """
        ...


def whole(name: str, tensor: torch.Tensor) -> Encoded:
    return Piece(name, WHOLE, tensor.numel() * tensor.element_size()), tensor


def check_whole(piece: Piece, spec: TensorSpec) -> None:
    if piece.encoding != WHOLE:
        raise RefusedError(f"{piece.name} has the unknown encoding {piece.encoding!r}")
    if piece.nbytes != spec.nbytes:
        raise RefusedError(f"{piece.name} came with {piece.nbytes} bytes, {spec} has {spec.nbytes}")


def own_part(piece: Piece, content: torch.Tensor, spec: TensorSpec, shard: Shard | None) -> torch.Tensor:
    """uint8 [bytes], what a holder of `shard` stages of `content`: of a whole tensor like `spec` that part, copied, so
    that the rest can go; of another encoding all.
    """
    if shard is None or piece.encoding != WHOLE:
        return content
    whole_tensor = content.view(getattr(torch, spec.dtype)).view(spec.shape)
    return byte_view(shard.of(whole_tensor).clone(memory_format=torch.contiguous_format))


def write_whole(content: torch.Tensor, live: torch.Tensor) -> None:
    live_bytes(live).copy_(content)


def live_bytes(live: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes], the memory of a live tensor itself. Raises ValueError for one that is not contiguous."""
    if not live.is_contiguous():
        raise ValueError(
            f"a live tensor {tuple(live.shape)} with strides {live.stride()} cannot be written in place"
        )
    return byte_view(live)

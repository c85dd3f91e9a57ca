"""The processes that share a model, and what they tell each other. With one process nothing is sent.

Every process makes the same calls with the same arguments in the same order. A mini-batch is shared out over the
data-parallel ranks by rows. A loss is divided by counts over the whole mini-batch (`learner.aggregation`), so its
gradient is the sum, not the mean, of what the ranks computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kernels.digest import byte_view
from learner.batch import cut
from learner.errors import OtherRankFailed
from learner.families.architecture import Architecture
from learner.layout import EMBEDDING, Place
from learner.mapping import is_expert
from learner.megatron_api import gather_from_tensor_model_parallel_region, parallel_state

# Whole on every tensor-parallel rank, each of which has the part of the gradient from its own heads or tokens.
_PARTIAL = ("layernorm.weight", ".mlp.router.weight")


@dataclass(frozen=True)
class Pass:
    """A micro-batch: rows int64 of the mini-batch. idle: for company only, as other ranks have more micro-batches and
    share experts with this one; nothing of it counts."""

    rows: torch.Tensor
    idle: bool = False


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same shard of a parameter, over which its gradient is summed.

    counted: whether this rank's group counts in the gradient's norm; another holds the same if not. copies: the ranks
    of other stages that hold it too, each with its part of the gradient.
    """

    group: dist.ProcessGroup
    counted: bool
    copies: dist.ProcessGroup | None = None

    @property
    def count(self) -> int:
        return self.group.size()

    @property
    def index(self) -> int:
        return self.group.rank()


class Vocabulary:
    """A `learner.logprobs.VocabularyPart`: tensor parallelism cuts the output layer. Without tokens nothing is sent."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.index, self.parts = group, group.rank(), group.size()

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        if not logits.numel():
            return torch.cat([logits] * self.parts, -1)
        return gather_from_tensor_model_parallel_region(logits)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(values, self.group) if values.numel() else values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        if values.numel():
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0], None


def share(lengths: torch.Tensor, max_tokens: int, rank: int, ranks: int, lockstep: bool) -> list[Pass]:
    """The micro-batches of data-parallel rank `rank`, cut by `learner.batch.cut` from rows rank, rank + ranks, ...

    lengths: int64 [B], of the whole mini-batch. lockstep: all ranks have equally many, some idle. Raises ValueError
    when there are fewer rows than ranks, and as `cut` does.
    """
    if len(lengths) < ranks:
        raise ValueError(f"a batch of {len(lengths)} sequences cannot be shared out over {ranks} ranks")
    shares = [torch.arange(own, len(lengths), ranks) for own in range(ranks)]
    passes = [[rows[part] for part in cut(lengths[rows], max_tokens)] for rows in shares]
    own = [Pass(rows) for rows in passes[rank]]
    if lockstep:
        shortest = lengths.argmin(keepdim=True)
        own += [Pass(shortest, idle=True)] * (max(map(len, passes)) - len(own))
    return own


class Ranks:
    """What this process has to do with the others that share a model.

    device: where its part of the model is. copied: whether the last stage has a copy of the embedding, as output layer.
    """

    def __init__(self, place: Place, model: Architecture, device: torch.device, copied: bool) -> None:
        self.place, self.model, self.device = place, model, device
        self.copied = copied and place.layout.pipeline > 1
        self.count = place.layout.ranks
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group()

    @property
    def speaks(self) -> bool:
        """Whether this rank holds results of its rows that no rank of lower number holds too."""
        return self.place.last_stage and self.place.tensor == 0

    def passes(self, lengths: torch.Tensor, max_tokens: int) -> list[Pass]:
        """The micro-batches of this rank; see `share`."""
        layout = self.place.layout
        return share(lengths, max_tokens, self.place.data, layout.data, lockstep=layout.expert > 1)

    def replicas(self, name: str) -> Replicas:
        """Of the parameter `name` (a global name)."""
        if is_expert(name):
            return Replicas(parallel_state.get_expert_data_parallel_group(), True)
        if name.endswith(_PARTIAL):
            return Replicas(parallel_state.get_tensor_and_data_parallel_group(), True)
        cut_here = self.place.layout.shards(name)[1] > 1
        copied = self.copied and name == EMBEDDING
        counted = (cut_here or self.place.tensor == 0) and not (copied and not self.place.first_stage)
        return Replicas(self.data_group, counted, parallel_state.get_embedding_group() if copied else None)

    def sum_metrics(self, own: Mapping[str, float]) -> dict[str, float]:
        """Added up over the rows of all ranks, in float64; on every rank."""
        if self.count == 1:
            return dict(own)
        names = list(own)
        total = torch.tensor([*own.values()], dtype=torch.float64, device=self.device)
        if self.place.last_stage:
            dist.all_reduce(total, group=self.data_group)
        found = dict(zip(names, total.tolist(), strict=True))
        return self.tell(found, self.count - self.place.layout.stage_ranks)

    def merge(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of tensors on the CPU: where a position is zero on all ranks but one, its value."""
        if self.count == 1:
            return parts
        total = parts.to(self.device)
        dist.all_reduce(total)
        return total.cpu()

    @property
    def vocabulary(self) -> Vocabulary | None:
        """This rank's part of it, where it is cut."""
        return None if self.place.layout.tensor == 1 else Vocabulary(self.tensor_group)

    def collect(
        self, name: str, own: Callable[[], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """On rank 0 the whole of a tensor that is cut as the parameter `name` (a global name) is; None elsewhere.

        own: gives this rank's shard, asked for if it is the first to hold it. shape, dtype: of the whole tensor, cut
        evenly. Where rank 0 holds all of it, that is returned itself.
        """
        holders = self.place.layout.first_holder(name, self.model)
        dim, shards = self.place.layout.shards(name)
        rank = self.place.rank
        if rank and rank in holders.values():
            dist.send(byte_view(own()), dst=0)
        if rank:
            return None
        if list(holders.values()) == [0]:
            return own()
        if shards == 1:
            return self._receive(holders[0], shape, dtype)
        part = (*shape[:dim], shape[dim] // shards, *shape[dim + 1 :])
        return torch.cat(
            [
                own().detach() if holder == 0 else self._receive(holder, part, dtype)
                for _, holder in sorted(holders.items())
            ],
            dim,
        )

    def tell(self, value: Any, source: int) -> Any:
        """On every rank what rank `source` has: plain values."""
        if self.count == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=source)
        return told[0]

    def _receive(self, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        received = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(byte_view(received), src=source)
        return received

    def barrier(self) -> None:
        if self.count > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around work of one rank, which may fail: an error on any rank stops all of them here.

        The others raise OtherRankFailed, rather than wait for ever for the rank that failed.
        """
        try:
            yield
        except BaseException:
            self.merge(torch.ones(1))
            raise
        failed = int(self.merge(torch.zeros(1)).item())
        if failed:
            raise OtherRankFailed(f"{failed} of {self.count} ranks failed; no weight was changed")

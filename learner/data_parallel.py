"""Data parallelism: each rank holds the whole model and its own rows of every mini-batch, and all take one step.

A loss is divided by counts over the whole mini-batch (`learner.aggregation`), so the gradient of the mini-batch is the
sum, not the mean, of what the ranks computed. It is summed in FP32; norm, clipping and step then see the same bits on
every rank, and weights stay equal without being sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple

import torch
import torch.distributed as dist
from torch import nn

from learner.batch import Totals, TrainBatch
from learner.megatron_api import parallel_state


def share(batch: TrainBatch, rank: int, ranks: int) -> TrainBatch:
    """The rows of rank `rank`: number rank, rank + ranks, and so on. Raises ValueError when there are none."""
    if not 0 <= rank < ranks or rank >= len(batch.tokens):
        raise ValueError(f"rank {rank} of {ranks} has no row in a batch of {len(batch.tokens)} sequences")
    return batch.select(torch.arange(rank, len(batch.tokens), ranks))


class DataParallel:
    """Sums over the data-parallel ranks of Megatron's process groups; with one rank nothing is sent.

    Every rank must make the same calls in the same order. device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.group = parallel_state.get_data_parallel_group()
        self.ranks = dist.get_world_size(self.group)

    def sum_totals(self, own: Totals) -> Totals:
        """Counts over the whole mini-batch."""
        return Totals(*self._sum(torch.tensor(astuple(own), dtype=torch.int64)).tolist())

    def sum_metrics(self, own: Mapping[str, float]) -> dict[str, float]:
        """Added up in float64. Every rank must hold the same names in the same order."""
        return dict(
            zip(own, self._sum(torch.tensor([*own.values()], dtype=torch.float64)).tolist(), strict=True)
        )

    def sum_gradients(self, masters: Iterable[nn.Parameter]) -> None:
        """Replace each FP32 gradient by its sum over the ranks."""
        if self.ranks == 1:
            return
        for master in masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            dist.all_reduce(master.grad, group=self.group)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around work of one rank, which may fail: an error on any rank stops all of them here.

        The others raise RuntimeError, rather than wait for ever for the rank that failed.
        """
        try:
            yield
        except BaseException:
            self._sum(torch.ones(1))
            raise
        failed = int(self._sum(torch.zeros(1)).item())
        if failed:
            raise RuntimeError(f"{failed} of {self.ranks} data-parallel ranks failed; no weight was changed")

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        if self.ranks == 1:
            return own
        total = own.to(self.device)
        dist.all_reduce(total, group=self.group)
        return total.cpu()

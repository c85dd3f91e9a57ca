"""The processes of one engine, and what they must agree on. One process has nobody to ask.

All of them run the same requests through schedulers of their own and draw the same tokens: the logits are put together
from parts that one process each computed, so that all have the same bits, and seeds belong to requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist


class Ranks:
    """count: of processes. group: in which they speak, of a kind that carries objects."""

    def __init__(self, count: int, group: Any = None) -> None:
        self.count, self._group = count, group

    @classmethod
    def of_engine(cls, count: int) -> Ranks:
        """Those of the engine that runs in this process."""
        if count == 1:
            return cls(1)
        from vllm.distributed import get_world_group

        return cls(count, get_world_group().cpu_group)

    def agree(self, problem: ValueError | None, written: Iterable[Any]) -> None:
        """To be called by all of them after the same work. problem: what this one found wrong; written: its results, of
        plain values.

        Raises `problem`, or ValueError with what another found wrong, and RuntimeError when the results differ.
        """
        if self.count == 1:
            if problem is not None:
                raise problem
            return
        own = str(problem or ""), hashlib.sha256(repr(list(written)).encode()).hexdigest()
        told: list[Any] = [None] * self.count
        dist.all_gather_object(told, own, group=self._group)
        if problems := [text for text, _ in told if text]:
            raise ValueError(" | ".join(dict.fromkeys(problems)))
        if len({digest for _, digest in told}) > 1:
            digests = ", ".join(f"rank {rank}: {digest[:8]}" for rank, (_, digest) in enumerate(told))
            raise RuntimeError(f"the processes of one engine wrote different responses ({digests})")

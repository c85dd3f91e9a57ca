"""Strict attention over vLLM's paged cache of keys and values."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl

from kernels.model_spec import ModelSpec
from kernels.strict.attention import attention

_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 25}  # of keys that are gathered at once, about
_PLAN = "minite_plan"  # what all layers of a step share, beside vLLM's metadata of that step


@dataclass(frozen=True, eq=False)
class Part:
    """Sequences with equally many tokens in this step, which are computed together.

    rows: int64 [B, Q], their tokens' places in the step; first: int64 [B], the position of the first of those; blocks:
    int64 [B, N], where the cache has each sequence, as far as the longest of them needs.
    """

    rows: torch.Tensor
    first: torch.Tensor
    blocks: torch.Tensor


class StrictAttention(AttentionImpl):
    """In the place of the implementation of a vLLM back end, whose cache and metadata it uses: that for CPUs, and on
    CUDA the one that `sampler.engine` asks for.

    The cache [blocks, groups, tokens of a block, 2 * D] belongs to the implementation: here each token has its key and
    then its value. All that decode are computed together.
    """

    def __init__(self, own: AttentionImpl, model: ModelSpec) -> None:
        self.num_heads, self.num_kv_heads = own.num_heads, own.num_kv_heads
        self.head_size, self.scale = own.head_size, own.scale
        self.kv_cache_dtype, self.sliding_window = own.kv_cache_dtype, own.sliding_window
        self.under(model)

    def under(self, model: ModelSpec) -> None:
        self.rule = model.attention

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """key, value [T, groups, D] into the slots int [T]; those below 0 are padding."""
        assert kv_cache.shape[1::2] == (self.num_kv_heads, 2 * self.head_size), kv_cache.shape
        rows = (slot_mapping >= 0).nonzero().squeeze(1)
        slots = slot_mapping[rows].long()
        size = kv_cache.shape[2]
        kv_cache[slots // size, :, slots % size] = torch.cat((key[rows], value[rows]), dim=-1)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, output [T, heads, D]; keys and values of these tokens are in the cache already."""
        if attn_metadata is None:  # a trial run, for memory
            return output
        for part in self._plan(attn_metadata, kv_cache):
            gathered = kv_cache[part.blocks].transpose(2, 3).flatten(1, 2)  # [B, N * size, groups, 2 D]
            keys, values = gathered.chunk(2, dim=-1)
            output[part.rows] = attention(query[part.rows], keys, values, part.first, self.scale, self.rule)
        return output

    def _plan(self, metadata: Any, kv_cache: torch.Tensor) -> list[Part]:
        """Made by the first layer of a step, which alone has to wait for a GPU."""
        plan: list[Part] | None = getattr(metadata, _PLAN, None)
        if plan is None:
            plan = self._parts(metadata, kv_cache.shape[2], kv_cache.device)
            setattr(metadata, _PLAN, plan)
        return plan

    def _parts(self, metadata: Any, size: int, device: torch.device) -> list[Part]:
        """size: tokens of a block."""
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        table = metadata.block_table
        by_count: defaultdict[int, list[int]] = defaultdict(list)
        for request, length in enumerate(lengths):
            if count := starts[request + 1] - starts[request]:
                by_count[count].append(request)
                assert length >= count
        parts = []
        for count, requests in by_count.items():
            longest = max(lengths[request] for request in requests)
            at_once = max(1, _ELEMENTS[device.type] // (longest * self.num_kv_heads * self.head_size))
            for begin in range(0, len(requests), at_once):
                some = requests[begin : begin + at_once]
                rows = torch.tensor([starts[r] for r in some])[:, None] + torch.arange(count)
                total = torch.tensor([lengths[r] for r in some])
                used = -(-total // size)
                within = torch.arange(int(used.max())) < used[:, None]
                # What the table says behind a sequence's last block means nothing.
                own = table[torch.tensor(some, device=table.device), : within.shape[1]]
                blocks = torch.where(within.to(own.device), own, 0).long()
                parts.append(Part(rows.to(device), (total - count).to(device), blocks.to(device)))
        return parts

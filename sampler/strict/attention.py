"""Strict attention over vLLM's paged cache of keys and values."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl

from kernels.model_spec import ModelSpec
from kernels.strict.attention import attention

_ELEMENTS = 1 << 23  # of keys that are gathered at once, about


class StrictAttention(AttentionImpl):
    """In the place of the implementation of vLLM's CPU back end, whose cache and metadata it uses.

    The cache [blocks, groups, tokens of a block, 2 * D] belongs to the implementation: here each token has its key and
    then its value. Sequences whose tokens of this step are equally many (all that decode) are computed together.
    """

    def __init__(self, own: AttentionImpl, model: ModelSpec) -> None:
        self.num_heads, self.num_kv_heads = own.num_heads, own.num_kv_heads
        self.head_size, self.scale = own.head_size, own.scale
        self.kv_cache_dtype, self.sliding_window = own.kv_cache_dtype, own.sliding_window
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
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        by_count: defaultdict[int, list[int]] = defaultdict(list)
        for request, length in enumerate(lengths):
            if count := starts[request + 1] - starts[request]:
                by_count[count].append(request)
                assert length >= count
        for count, requests in by_count.items():
            longest = max(lengths[request] for request in requests)
            at_once = max(1, _ELEMENTS // (longest * self.num_kv_heads * self.head_size))
            for begin in range(0, len(requests), at_once):
                some = requests[begin : begin + at_once]
                rows = torch.tensor([starts[r] for r in some])[:, None] + torch.arange(count)
                total = torch.tensor([lengths[r] for r in some])
                keys, values = self._cached(kv_cache, attn_metadata.block_table[some], total)
                own = query[rows.to(query.device)]
                first = (total - count).to(query.device)
                output[rows.to(query.device)] = attention(own, keys, values, first, self.scale, self.rule)
        return output

    def _cached(
        self, kv_cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Keys and values [B, L, groups, D] of sequences with block tables int [B, blocks], L as the longest needs."""
        size = kv_cache.shape[2]
        used = -(-lengths // size)
        table = table[:, : int(used.max())]
        within = torch.arange(table.shape[1]) < used[:, None]
        # What the table says behind a sequence's last block means nothing.
        blocks = torch.where(within.to(table.device), table, 0).long()
        gathered = kv_cache[blocks].transpose(2, 3).flatten(1, 2)  # [B, blocks * size, groups, 2 D]
        return gathered.chunk(2, dim=-1)

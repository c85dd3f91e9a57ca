"""Strict attention over a paged cache, in either memory order of the cache, against the sequences themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.strict.attention import attention
from sampler.strict import attention as paged

HEADS, GROUPS, WIDTH, BLOCK, BLOCKS = 4, 2, 32, 16, 40
LENGTHS, COUNTS = (
    [33, 5, 16, 47, 1, 48],
    [1, 5, 1, 17, 1, 17],
)  # tokens of sequences, and of those in this step


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("at_once", [1 << 23, 1])
def test_it_is_that_of_each_sequence_alone(
    order: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(paged._ELEMENTS, "cpu", at_once)
    torch.manual_seed(0)
    model = named_spec("strict").model
    assert model is not None
    own = SimpleNamespace(
        num_heads=HEADS,
        num_kv_heads=GROUPS,
        head_size=WIDTH,
        scale=WIDTH**-0.5,
        kv_cache_dtype="auto",
        sliding_window=-1,
    )
    strict = paged.StrictAttention(own, model)
    keys, values = ([torch.randn(length, GROUPS, WIDTH) for length in LENGTHS] for _ in range(2))
    queries = [torch.randn(count, HEADS, WIDTH) for count in COUNTS]
    cache = torch.full([(BLOCKS, GROUPS, BLOCK, 2 * WIDTH)[axis] for axis in order], 7.0).permute(order)
    table = torch.randperm(BLOCKS)[: len(LENGTHS) * 3].view(len(LENGTHS), 3).int()

    def slots(sequence: int, first: int) -> torch.Tensor:
        positions = torch.arange(first, LENGTHS[sequence])
        return table[sequence, positions // BLOCK].long() * BLOCK + positions % BLOCK

    for sequence, (key, value) in enumerate(zip(keys, values, strict=True)):
        padded = torch.cat((slots(sequence, 0), torch.tensor([-1])))
        key, value = (torch.cat((tensor, torch.full_like(tensor[:1], torch.nan))) for tensor in (key, value))
        strict.do_kv_cache_update(None, key, value, cache, padded)
    table[1, 1:] = 10_000  # behind a sequence's last block
    starts = torch.tensor([0, *COUNTS]).cumsum(0)
    metadata = SimpleNamespace(
        query_start_loc=starts.int(), seq_lens=torch.tensor(LENGTHS).int(), block_table=table
    )
    for _ in range(2):  # as two layers of a step do
        output = torch.full((sum(COUNTS), HEADS, WIDTH), torch.nan)
        strict.forward(None, torch.cat(queries), None, None, cache, metadata, output)
        for sequence, found in enumerate(output.split(COUNTS)):
            parts = (queries[sequence], keys[sequence], values[sequence])
            first = torch.tensor([LENGTHS[sequence] - COUNTS[sequence]])
            expected = attention(*(part[None] for part in parts), first, own.scale, model.attention)[0]
            assert torch.equal(found, expected), sequence

"""A process of its own for test_strict: samplers under the strict spec answer the same requests in different ways."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from sampler.config import SamplerConfig, SamplingConfig
from sampler.engine import Sampler

OTHER = {"model.rotary": "bf16"}
LAYERS, VOCAB, TEMPERATURE = 2, 61, 0.8
MAX_LEN, TOKENS, PROMPTS = 128, 48, 32
ONE_TOKEN = LAYERS * 2 * 2 * 32 * 4  # bytes of its keys and values
# What differs from a batch of 32 sequences in a cache of room, and how many of the prompts are answered. One by one,
# every token costs a pass of its own: a model of one layer answers ALONE prompts in that way (ONE_LAYER).
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "32 together": ({}, PROMPTS),
    "prompts cut, no prefix cache": (
        {"prefix_caching": False, "chunked_prefill": True, "max_num_batched_tokens": 40},
        PROMPTS,
    ),
    "7 together, prompts cut, two threads, preempted": (
        {
            "max_num_seqs": 7,
            "chunked_prefill": True,
            "max_num_batched_tokens": 24,
            "threads": 2,
            "kv_cache_gib": 12 * 32 * ONE_TOKEN / 2**30,
        },
        PROMPTS,
    ),
    "alone": ({"max_num_seqs": 1}, 1),
}
ALONE = 10
ONE_LAYER: dict[str, Any] = {"max_num_seqs": 1, "prefix_caching": False}
CONFIG = SamplerConfig(
    max_model_len=MAX_LEN, max_num_seqs=32, max_num_batched_tokens=512, kv_cache_gib=1 / 32, threads=1
)
Row = tuple[list[int], list[int], list[float]]


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 64 tokens; every other one begins with the same 40, more than a block of the cache."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(VOCAB, (40,), generator=generator).tolist()
    made = []
    for number in range(count):
        length = int(torch.randint(1, 25, (1,), generator=generator))
        own = torch.randint(VOCAB, (length,), generator=generator).tolist()
        made.append(shared + own if number % 2 else own)
    return made


@contextmanager
def watched(sampler: Sampler) -> Iterator[dict[str, int]]:
    """How often, inside, a sequence was preempted, and one began with what the prefix cache held."""
    scheduler = sampler._llm.llm_engine.engine_core.engine_core.scheduler
    preempt, look_up = scheduler._preempt_request, scheduler.kv_cache_manager.get_computed_blocks
    seen = {"preemptions": 0, "cache hits": 0}

    def looked_up(*args: Any, **kwargs: Any) -> Any:
        found = look_up(*args, **kwargs)  # blocks, and how many tokens they hold
        seen["cache hits"] += found[1] > 0
        return found

    with (
        patch.object(scheduler, "_preempt_request", wraps=preempt) as preempted,
        patch.object(scheduler.kv_cache_manager, "get_computed_blocks", looked_up),
    ):
        yield seen
    seen["preemptions"] = preempted.call_count


def answer(sampler: Sampler, count: int) -> list[Row]:
    sampling = SamplingConfig(max_tokens=TOKENS, temperature=TEMPERATURE)
    responses = sampler.generate(prompts(count), [[number] for number in range(count)], sampling)
    return [
        (prompt, list(own[0].token_ids), list(own[0].logp))
        for prompt, own in zip(prompts(count), responses, strict=True)
    ]


def scored(sampler: Sampler, rows: list[Row]) -> list[list[float]]:
    """The responses' log-probabilities by teacher forcing."""
    sequences = [prompt + response for prompt, response, _ in rows]
    return sampler.score(sequences, [len(prompt) for prompt, _, _ in rows], TEMPERATURE)


def main(folder: str, device: str) -> None:
    place, strict = Path(folder), PrecisionMap.resolve(LAYERS, named_spec("strict"))
    config = replace(CONFIG, device=device)
    saved: dict[str, Any] = {}
    alive = []  # the end of one engine would take vLLM's process groups from the others
    for way, (changes, count) in WAYS.items():
        sampler = Sampler(place / "qwen3_moe", strict, replace(config, **changes))
        alive.append(sampler)
        with watched(sampler) as saved["seen", way]:
            saved[way] = answer(sampler, count)
    saved["scored"] = scored(alive[0], saved["32 together"][:8])
    alive[0].compute_under(PrecisionMap.resolve(LAYERS, named_spec("strict", OTHER)), lambda layer: None)
    saved["under another spec"] = scored(alive[0], saved["32 together"][:8])
    sampler = Sampler(place / "mixtral", strict, replace(config, dtype="bfloat16"))
    alive.append(sampler)
    saved["mixtral"] = answer(sampler, 4)
    one_layer = PrecisionMap.resolve(1, named_spec("strict"))
    sampler = Sampler(place / "one_layer", one_layer, replace(config, **ONE_LAYER))
    alive.append(sampler)
    with watched(sampler) as saved["seen", "one_layer"]:
        saved["one_layer"] = answer(sampler, ALONE)
    torch.save(saved, place / f"saved_{device}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])

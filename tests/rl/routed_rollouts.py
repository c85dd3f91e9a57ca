"""A process of its own for test_routing_replay: a sampler writes rollouts with their routes into a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from rl.data.problem import Problem
from rl.data.prompts import Prompt
from rl.pipeline import RolloutBatch
from rl.rewards.score import Score
from rl.rollout import Group, Rollout
from rl.rollout_store import save_rollouts
from sampler.config import SamplerConfig, SamplingConfig
from sampler.engine import Sampler

LAYERS, VOCAB, PROMPTS = 3, 61, 6


def prompt_at(position: int) -> Prompt:
    """Up to 47 tokens: the longest share a block of the cache, 32 tokens, among their responses."""
    generator = torch.Generator().manual_seed(position)
    tokens = torch.randint(VOCAB, (2 + 9 * position,), generator=generator).tolist()
    return Prompt(position, Problem(str(position), "q", "a", "s"), tuple(tokens))


def main(model: str, folder: str) -> None:
    sizes = {"max_model_len": 96, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    config = SamplerConfig(**sizes, kv_cache_gib=1 / 64, threads=1)
    sampler = Sampler(model, PrecisionMap.resolve(LAYERS, named_spec("minite")), config)
    prompts = [prompt_at(position) for position in range(PROMPTS)]
    seeds = [[10 * prompt.position + sample for sample in range(3)] for prompt in prompts]
    sampling = SamplingConfig(max_tokens=20, stop_token_ids=(5, 11), return_routes=True)
    responses = sampler.generate([prompt.token_ids for prompt in prompts], seeds, sampling)
    groups = [
        Group(prompt, tuple(Rollout(completion, Score.of(True)) for completion in own))
        for prompt, own in zip(prompts, responses, strict=True)
    ]
    save_rollouts(Path(folder), RolloutBatch(groups, PROMPTS, {}))


if __name__ == "__main__":
    main(*sys.argv[1:])

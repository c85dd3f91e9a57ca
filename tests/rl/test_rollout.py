"""Rollouts as tensors, their seeds and their statistics."""

from __future__ import annotations

import pytest
import torch

from rl.data.problem import Problem
from rl.data.prompts import Prompt
from rl.rewards.score import Score
from rl.rollout import Group, Rollout, response_seed, response_statistics, to_sequences
from sampler.engine import Completion


def group(prompt: tuple[int, ...], *responses: tuple[tuple[int, ...], Score, str]) -> Group:
    rollouts = [
        Rollout(Completion(tokens, tuple(-0.5 * t for t in tokens), reason, (1,) * len(tokens)), score)
        for tokens, score, reason in responses
    ]
    return Group(Prompt(0, Problem("p", "q", "a", "s"), prompt), tuple(rollouts))


RIGHT, WRONG, FAILED = Score.of(True), Score.of(False), Score.failed("timeout")
GROUPS = [
    group((5, 6), ((7, 8, 9), RIGHT, "stop"), ((1,), WRONG, "length")),
    group((4,), ((2, 3), FAILED, "stop"), ((9, 9), RIGHT, "length")),
]


def test_each_position_carries_the_value_of_its_token():
    sequences = to_sequences(GROUPS)
    assert sequences.lengths.tolist() == [5, 3, 3, 3]
    assert sequences.tokens.tolist() == [[5, 6, 7, 8, 9], [5, 6, 1, 0, 0], [4, 2, 3, 0, 0], [4, 9, 9, 0, 0]]
    assert sequences.loss_mask.int().tolist() == [
        [0, 0, 1, 1, 1],
        [0, 0, 1, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 0, 0],
    ]
    assert sequences.sampler_logp.dtype == torch.float32
    assert torch.equal(sequences.sampler_logp, torch.where(sequences.loss_mask, -0.5 * sequences.tokens, 0.0))


def test_a_failed_verifier_is_not_a_wrong_answer():
    statistics = response_statistics(GROUPS)
    assert statistics["reward/mean"] == pytest.approx(2 / 3)
    assert statistics["reward/accuracy"] == pytest.approx(2 / 3)
    assert statistics["reward/error_rate"] == pytest.approx(1 / 4)
    assert statistics["response/length_mean"] == 2
    assert statistics["response/length_max"] == 3
    assert statistics["response/truncated"] == 0.5
    assert statistics["tokens/generated"] == 8


def test_every_response_of_a_run_has_a_seed_of_its_own():
    seeds = {
        response_seed(seed, purpose, position, sample)
        for seed in range(3)
        for purpose in ("train", "held_out")
        for position in range(20)
        for sample in range(8)
    }
    assert len(seeds) == 3 * 2 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)

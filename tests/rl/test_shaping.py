from __future__ import annotations

import math

import pytest
import torch

from learner.config import KLConfig
from rl.config.algorithm import ShapingConfig
from rl.groups import Verdict, judge
from rl.rollout import to_sequences
from rl.shaping import (
    kl_penalty,
    learned_from,
    overlong_penalties,
    overlong_penalty,
    shaped_rewards,
    token_rewards,
)
from tests.rl.rollouts import group, rollout


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (0, 0.0),
        (1, 0.0),
        (16_383, 0.0),
        (16_384, 0.0),  # limit - buffer
        (16_385, -1 / 4096),
        (18_432, -0.5),
        (20_479, -4095 / 4096),
        (20_480, -1.0),  # the limit
        (20_481, -1.0),
        (10**6, -1.0),  # never less than -factor, however long
    ],
)
def test_the_published_overlong_penalty(length: int, penalty: float):
    assert overlong_penalty(length, 20_480, 4096) == penalty
    assert overlong_penalty(length, 20_480, 4096, factor=0.5) == penalty / 2


def test_a_buffer_as_long_as_the_limit_and_none():
    assert [overlong_penalty(length, 10, 10) for length in (0, 5, 10)] == [0.0, -0.5, -1.0]
    assert [overlong_penalty(length, 10, 0) for length in (0, 10, 11)] == [0.0, 0.0, 0.0]


def test_lengths_are_tokens_of_the_response():
    """Neither the prompt nor characters count: 8 of 10 tokens are half-way through a buffer of 4."""
    groups = [group(rollout(1.0, length=8), rollout(0.0, length=6))]
    assert overlong_penalties(groups, ShapingConfig(overlong_buffer=4), 10).tolist() == [[-0.5, 0.0]]


def test_by_default_rewards_are_the_raw_values_bit_for_bit():
    values = [0.1, -0.0, 1 / 3, 1.0]
    found = shaped_rewards([group(*map(rollout, values))], ShapingConfig(), 3)
    assert found.dtype == torch.float64
    assert found.tolist() == [values]


def test_rewards_with_everything_on():
    config = ShapingConfig(overlong_buffer=4, overlong_factor=2.0, truncated_reward=-1.0)
    groups = [
        group(rollout(1.0, length=6), rollout(1.0, length=9)),
        group(rollout(1.0, length=10, truncated=True), rollout(0.0)),
    ]
    assert shaped_rewards(groups, config, 10).tolist() == [[1.0, 1.0 - 1.5], [-1.0 - 2.0, 0.0]]


def test_a_group_of_right_answers_of_different_lengths_is_constant():
    """Dynamic sampling sees the raw outcome, whatever shaping makes of it afterwards."""
    solved = group(rollout(1.0, length=2), rollout(1.0, length=9))
    assert judge(solved.scores) is Verdict.SOLVED
    shaped = shaped_rewards([solved], ShapingConfig(overlong_buffer=4), 10)
    assert shaped.min() < shaped.max()


def test_truncated_responses_leave_the_loss_only_when_asked():
    groups = [
        group(rollout(1.0), rollout(0.0, truncated=True)),
        group(rollout(0.0, truncated=True), rollout(0.0)),
    ]
    mask = to_sequences(groups).loss_mask
    assert learned_from(mask, groups, ShapingConfig()) is mask
    found = learned_from(mask, groups, ShapingConfig(truncated="mask"))
    assert found.any(1).tolist() == [True, False, False, True]
    assert torch.equal(found[[0, 3]], mask[[0, 3]])


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.4), ("k2", 0.08), ("k3", math.exp(-0.4) - 1 + 0.4)]
)
def test_the_kl_penalty_of_each_token(estimator: str, expected: float):
    mask = torch.tensor([[False, True, True]])
    old, reference = torch.tensor([[math.nan, -1.0, -2.0]]), torch.tensor([[math.inf, -1.4, -2.0]])
    found = kl_penalty(old, reference, mask, KLConfig(coefficient=0.5, estimator=estimator, place="reward"))
    assert found[0].tolist() == pytest.approx([0.0, 0.5 * expected, 0.0], rel=1e-6)


def test_the_last_token_earns_the_reward_and_each_pays_its_penalty():
    mask = torch.tensor([[False, True, True, True], [False, True, False, False], [False] * 4])
    penalty = torch.full((3, 4), 0.25, dtype=torch.float64)
    found = token_rewards(torch.tensor([2.0, -1.0, 9.0]), penalty, mask)
    assert found.tolist() == [[0.0, -0.25, -0.25, 1.75], [0.0, -1.25, 0.0, 0.0], [0.0] * 4]

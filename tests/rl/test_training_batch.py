from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from learner.config import CorrectionConfig, CriticConfig, KLConfig, ObjectiveConfig
from rl.advantages import group_advantages
from rl.config.algorithm import AdvantageConfig, AlgorithmConfig, ShapingConfig
from rl.metrics import METRICS
from rl.rollout import Sequences, to_sequences
from rl.training_batch import NothingToLearn, mini_batches, training_batch
from sampler.config import SamplingConfig
from tests.rl.rollouts import group, rollout

GROUPS = [
    group(rollout(1.0), rollout(0.0, length=2), position=0),
    group(rollout(0.0, length=4, truncated=True), rollout(1.0, length=1), position=1),
]
SAMPLING = SamplingConfig(max_tokens=4)
WITH_CRITIC = {
    "objective": ObjectiveConfig(critic=CriticConfig()),
    "advantage": AdvantageConfig(estimator="gae", gamma=1.0, lam=1.0),
}


def algorithm(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(sampling=SAMPLING, **changes)


def tensors() -> tuple[Sequences, torch.Tensor]:
    sequences = to_sequences(GROUPS)
    return sequences, sequences.sampler_logp + 0.1


def test_by_default_raw_rewards_become_group_relative_advantages():
    sequences, old = tensors()
    batch, metrics = training_batch(GROUPS, sequences, old, algorithm())
    expected = group_advantages([[1.0, 0.0], [0.0, 1.0]]).flatten().float()
    assert torch.equal(batch.advantages, expected)
    assert batch.loss_mask is sequences.loss_mask and batch.old_logp is old
    assert batch.reference_logp is batch.old_values is batch.returns is None
    assert metrics.keys() <= METRICS.keys()
    assert metrics["reward/trained"] == 0.5 and metrics["response/left_out"] == 0


def test_what_is_logged_is_what_is_trained_on():
    sequences, old = tensors()
    shaping = ShapingConfig(overlong_buffer=2)
    objective = ObjectiveConfig(kl=KLConfig(coefficient=0.5, estimator="k1", place="reward"))
    settings = algorithm(shaping=shaping, objective=objective, advantage=AdvantageConfig(estimator="dr_grpo"))
    batch, metrics = training_batch(GROUPS, sequences, old, settings, reference_logp=old - 0.2)
    # 3 and 4 of at most 4 tokens cost 0.5 and 1; a token costs 0.1 of KL.
    trained = [[1 - 0.5 - 0.3, 0 - 0.2], [0 - 1 - 0.4, 1 - 0.1]]
    means = [sum(row) / 2 for row in trained]
    expected = [value - mean for row, mean in zip(trained, means, strict=True) for value in row]
    assert batch.advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert metrics["reward/trained"] == pytest.approx(sum(means) / 2, abs=1e-6)
    assert metrics["reward/overlong_penalty"] == pytest.approx(-1.5 / 4)
    assert metrics["reward/kl_penalty"] == pytest.approx(0.25, abs=1e-6)


def test_a_kl_penalty_in_the_loss_leaves_the_rewards_alone():
    sequences, old = tensors()
    settings = algorithm(objective=ObjectiveConfig(kl=KLConfig(coefficient=0.5)))
    batch, metrics = training_batch(GROUPS, sequences, old, settings, reference_logp=old - 0.2)
    assert torch.equal(batch.reference_logp, old - 0.2)
    assert metrics["reward/trained"] == 0.5 and "reward/kl_penalty" not in metrics


def test_left_out_responses_still_count_in_the_baseline_of_their_group():
    sequences, old = tensors()
    batch, metrics = training_batch(
        GROUPS, sequences, old, algorithm(shaping=ShapingConfig(truncated="mask"))
    )
    assert batch.loss_mask.sum(1).tolist() == [3, 2, 0, 1]
    assert batch.advantages[3].item() == pytest.approx(1, abs=1e-5)  # not a group of one
    assert batch.totals.tokens == 6  # the denominator holds no token that is left out
    assert metrics["response/left_out"] == 0.25


def test_correction_is_described_over_the_whole_batch():
    sequences, old = tensors()
    old = old.clone()
    old[0, 2] = 3.0
    objective = ObjectiveConfig(correction=CorrectionConfig(cap=2.0, token_band=(0.5, 5.0)))
    _, metrics = training_batch(GROUPS, sequences, old, algorithm(objective=objective))
    assert metrics["correction/clipped"] == metrics["correction/rejected"] == pytest.approx(1 / 10)
    assert metrics["correction/weight_mean"] == pytest.approx(9 * math.exp(0.1) / 10, rel=1e-5)
    assert metrics["correction/ess"] == pytest.approx(0.9, rel=1e-5)


def test_with_a_critic_advantages_and_returns_are_those_of_tokens():
    sequences, old = tensors()
    values = torch.full(old.shape, 0.25)
    batch, _ = training_batch(GROUPS, sequences, old, algorithm(**WITH_CRITIC), values=values)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0]).unsqueeze(1)
    mask = sequences.loss_mask
    torch.testing.assert_close(batch.returns, torch.where(mask, rewards, 0.0))
    torch.testing.assert_close(batch.advantages, torch.where(mask, rewards - 0.25, 0.0))
    assert torch.equal(batch.old_values, values)


def test_gae_without_values_is_refused():
    sequences, old = tensors()
    with pytest.raises(ValueError, match="gae needs the values of a critic"):
        training_batch(GROUPS, sequences, old, algorithm(**WITH_CRITIC))


def test_whitened_advantages_have_mean_zero_over_the_tokens_in_the_loss():
    sequences, old = tensors()
    settings = algorithm(
        advantage=AdvantageConfig(estimator="dr_grpo", whiten=True), shaping=ShapingConfig(truncated="mask")
    )
    batch, _ = training_batch(GROUPS, sequences, old, settings)
    tokens = batch.advantages[batch.loss_mask]
    assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
    assert tokens.square().mean().item() == pytest.approx(1, abs=1e-4)


def test_mini_batches_hold_every_row_once_and_in_order():
    sequences, old = tensors()
    batch, _ = training_batch(GROUPS, sequences, old, algorithm())
    parts = mini_batches(batch, 2)
    assert torch.equal(torch.cat([part.advantages for part in parts]), batch.advantages)
    assert [part.totals.tokens for part in parts] == [5, 5]


def test_an_update_without_a_token_names_the_setting():
    truncated = [group(*[rollout(value, truncated=True) for value in (0.0, 1.0)])]
    settings = algorithm(shaping=ShapingConfig(truncated="mask"))
    sequences = to_sequences(truncated)
    with pytest.raises(NothingToLearn, match=r"all 2 responses .*algorithm\.shaping\.truncated=mask"):
        training_batch(truncated, sequences, sequences.sampler_logp, settings)
    groups = [GROUPS[0], truncated[0]]
    sequences = to_sequences(groups)
    batch, _ = training_batch(groups, sequences, sequences.sampler_logp, settings)
    with pytest.raises(NothingToLearn, match="the 2 responses of update 2"):
        mini_batches(batch, 2)

"""What is learned from: scored responses -> rewards, advantages, and the tensors of an update. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learner.batch import TrainBatch
from learner.correction import correct
from rl.advantages import explained_variance, generalised_advantages, group_advantages, whiten
from rl.config.algorithm import AlgorithmConfig
from rl.errors import UserError
from rl.rollout import Group, Sequences
from rl.shaping import kl_penalty, learned_from, overlong_penalties, shaped_rewards, token_rewards


class NothingToLearn(UserError):
    """No token of an update is in the loss."""


def training_batch(
    groups: Sequence[Group],
    sequences: Sequences,
    old_logp: torch.Tensor,
    algorithm: AlgorithmConfig,
    *,
    reference_logp: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    routes: torch.Tensor | None = None,
) -> tuple[TrainBatch, dict[str, float]]:
    """The batch of an iteration, and statistics of what it holds.

    groups: those that are learned from, and `sequences` made of them; old_logp, reference_logp, values: float32
    [B, S], by the learner before the update, the reference policy (with a KL penalty) and the critic (with gae);
    routes: int16 [B, S, layers, k], the experts to replay.

    Raises NothingToLearn when no token is in the loss.
    """
    responses = sequences.loss_mask
    mask = learned_from(responses, groups, algorithm.shaping)
    if not mask.any():
        raise NothingToLearn(_nothing(f"all {len(mask)} responses"))
    limit = algorithm.sampling.max_tokens
    rewards = shaped_rewards(groups, algorithm.shaping, limit)
    metrics = {
        "reward/overlong_penalty": overlong_penalties(groups, algorithm.shaping, limit).mean().item(),
        "response/left_out": 1 - mask.any(1).double().mean().item(),
    }
    penalty = torch.zeros(mask.shape, dtype=torch.float64)
    kl = algorithm.objective.kl
    if reference_logp is not None and kl.place == "reward":
        penalty = kl_penalty(old_logp, reference_logp, responses, kl)
        metrics["reward/kl_penalty"] = penalty.sum(1).mean().item()
    metrics["reward/trained"] = (rewards.mean() - penalty.sum(1).mean()).item()

    advantages, returns = _advantages(rewards, penalty, responses, algorithm, values)
    if values is not None and returns is not None:
        explained = explained_variance(values, returns, mask)
        metrics |= {} if explained is None else {"critic/explained_variance": explained}
    if algorithm.advantage.whiten:
        advantages = whiten(advantages, mask)
    batch = TrainBatch(
        sequences.tokens,
        sequences.lengths,
        mask,
        sequences.sampler_logp,
        old_logp,
        advantages.float(),
        reference_logp=reference_logp,
        old_values=values,
        returns=returns,
        routes=routes,
    )
    correction = correct(old_logp, sequences.sampler_logp, mask, algorithm.objective.correction)
    metrics |= {f"correction/{name}": value for name, value in correction.statistics().items()}
    return batch, metrics


def mini_batches(batch: TrainBatch, updates: int) -> list[TrainBatch]:
    """`batch` cut into the mini-batches of as many optimiser steps. Raises NothingToLearn when one has no token."""
    parts = [batch.select(rows) for rows in torch.arange(len(batch.tokens)).chunk(updates)]
    for number, part in enumerate(parts, 1):
        if not part.loss_mask.any():
            raise NothingToLearn(_nothing(f"the {len(part.tokens)} responses of update {number}"))
    return parts


def _advantages(
    rewards: torch.Tensor,
    penalty: torch.Tensor,
    responses: torch.Tensor,
    algorithm: AlgorithmConfig,
    values: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages, float64 [B] or with a critic [B, S], and with a critic the returns, float32 [B, S].

    rewards: float64 [G, N]; penalty: float64 [B, S], taken off the reward of each token of `responses`.
    """
    settings = algorithm.advantage
    if settings.estimator != "gae":
        paid = penalty.sum(1).view(rewards.shape)
        return group_advantages(rewards - paid, settings.estimator).flatten(), None
    if values is None:
        raise ValueError("algorithm.advantage.estimator=gae needs the values of a critic")
    earned = token_rewards(rewards.flatten(), penalty, responses)
    advantages, returns = generalised_advantages(earned, values, responses, settings.gamma, settings.lam)
    return advantages, returns.float()


def _nothing(which: str) -> str:
    return (
        f"{which} are cut off at the token limit, and algorithm.shaping.truncated=mask leaves those out of the loss:"
        " raise algorithm.sampling.max_tokens, or keep them"
    )

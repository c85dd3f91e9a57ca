"""From raw task outcomes to the rewards that are learned from, and which responses are learned from.

Shaping comes after dynamic sampling, which judges raw outcomes. Lengths are in tokens of the response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learner.config import KLConfig
from learner.kl import kl_estimate
from rl.config.algorithm import ShapingConfig
from rl.rollout import Group, Rollout


def overlong_penalty(length: int, limit: int, buffer: int, factor: float = 1.0) -> float:
    """Between -factor and 0: the soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 13).

    0 up to `limit - buffer` tokens, from there falling linearly to -factor at `limit`, and -factor beyond. A buffer of
    0 means no penalty. length, limit, buffer: tokens of a response.
    """
    if not buffer or length <= limit - buffer:
        return 0.0
    if length >= limit:
        return -factor
    return factor * (limit - buffer - length) / buffer


def overlong_penalties(groups: Sequence[Group], config: ShapingConfig, limit: int) -> torch.Tensor:
    """`overlong_penalty` of every response, float64 [groups, group size]; limit: most tokens of a response."""

    def penalty(rollout: Rollout) -> float:
        length = len(rollout.completion.token_ids)
        return overlong_penalty(length, limit, config.overlong_buffer, config.overlong_factor)

    return torch.tensor([[penalty(r) for r in group.rollouts] for group in groups], dtype=torch.float64)


def shaped_rewards(groups: Sequence[Group], config: ShapingConfig, limit: int) -> torch.Tensor:
    """Raw values, or `truncated_reward`, plus the penalty on length: float64 [groups, group size].

    limit: most tokens of a response.
    """

    def outcome(rollout: Rollout) -> float:
        if config.truncated_reward is not None and rollout.truncated:
            return config.truncated_reward
        return rollout.score.value

    outcomes = [[outcome(rollout) for rollout in group.rollouts] for group in groups]
    return torch.tensor(outcomes, dtype=torch.float64) + overlong_penalties(groups, config, limit)


def learned_from(loss_mask: torch.Tensor, groups: Sequence[Group], config: ShapingConfig) -> torch.Tensor:
    """loss_mask bool [B, S] without the responses that are not learned from (overlong filtering).

    Those are the truncated ones with `truncated: mask`. Their rewards still count in the baseline of their group.
    """
    if config.truncated != "mask":
        return loss_mask
    truncated = torch.tensor([rollout.truncated for group in groups for rollout in group.rollouts])
    return loss_mask & ~truncated.unsqueeze(1)


def kl_penalty(
    old_logp: torch.Tensor, reference_logp: torch.Tensor, mask: torch.Tensor, config: KLConfig
) -> torch.Tensor:
    """What is taken off the reward of each token: coefficient x KL estimate, float64 [B, S], zero outside the mask.

    old_logp, reference_logp: float32 [B, S], not read outside mask bool [B, S].
    """
    penalty = torch.zeros(mask.shape, dtype=torch.float64)
    estimate = kl_estimate(old_logp[mask].double(), reference_logp[mask].double(), config.estimator)
    penalty[mask] = config.coefficient * estimate
    return penalty


def token_rewards(rewards: torch.Tensor, penalty: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """float64 [B, S]: each token pays its `penalty` [B, S], and the last one in mask bool [B, S] of its row earns the
    reward [B] of the response. Rows without a token get nothing.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(1, keepdim=True)
    earned = torch.where(positions == last, rewards.double().unsqueeze(1), 0.0)
    return torch.where(mask, earned - penalty, 0.0)

"""The clipped loss of a value function. Pure: tensors in, loss and sums out.

For a response token with value V under the critic, old value V0 (before the update) and return R:

    loss = max((V - R)^2, (clip(V, V0 - value_clip, V0 + value_clip) - R)^2) / 2

so that a value gains nothing from moving further than value_clip in one update. Source: the PPO implementation of
Dhariwal et al. 2017 (OpenAI Baselines); the formula is in Huang et al. 2022, "The 37 Implementation Details of
Proximal Policy Optimization", detail 9.
"""

from __future__ import annotations

import torch

from learner.config import CriticConfig


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    denominator: int,
    config: CriticConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's share of the token mean, and sums over its tokens.

    values (differentiated), old_values, returns: float32 [B, S]; mask: bool [B, S], outside of which nothing is
    read; denominator: tokens in the loss mask of the whole mini-batch.

    Returns a 0-dimensional loss, and 0-dimensional sums that become what they are called when divided by the
    tokens in the mask: `value_mean`, `return_mean`, `value_error` (mean squared error) and `value_clip_share`
    (tokens whose gradient the bound removes).
    """
    value, old, target = values[mask], old_values[mask], returns[mask]
    error = (value - target).square()
    loss, clipped = error, torch.zeros_like(error, dtype=torch.bool)
    if config.value_clip is not None:
        bound = config.value_clip
        clipped_error = (old + (value - old).clamp(-bound, bound) - target).square()
        loss = torch.maximum(error, clipped_error)
        clipped = ((value - old).abs() > bound) & (clipped_error > error)
    with torch.no_grad():
        sums = {
            "value_mean": value.sum(),
            "return_mean": target.sum(),
            "value_error": error.sum(),
            "value_clip_share": clipped.sum(),
        }
    return loss.sum() / 2 / denominator, sums

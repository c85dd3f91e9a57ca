"""The clipped policy objective. Pure: tensors in, loss and sums out.

For a response token with advantage A, log-probabilities under the learner, new (differentiated) and old
(before the update), and under the sampler:

    r = exp(new - old)                               probability ratio
    w = min(exp(old - sampler), cap)                 truncated importance weight, a constant for the gradient
    loss = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

summed over the tokens in the loss mask and divided by their number in the whole mini-batch.

Sources: the clipped surrogate is PPO's (Schulman et al. 2017, arXiv 1707.06347, eq. 7). Separate bounds
("clip-higher") and the token mean are DAPO's (Yu et al. 2025, arXiv 2503.14476, sections 3.1 and 3.3). The
weight for the difference between sampler and learner is truncated importance sampling (Yao et al. 2025,
"Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). The KL estimate is k3 (Schulman
2020, "Approximating KL Divergence").
"""

from __future__ import annotations

import torch

from learner.config import ObjectiveConfig

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: far outside any clip range, far inside FP32


def policy_loss(
    new_logp: torch.Tensor,
    old_logp: torch.Tensor,
    sampler_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    denominator: int,
    config: ObjectiveConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's share of the loss, and sums over its tokens.

    new_logp, old_logp, sampler_logp: float32 [B, S]; advantages: float32 [B]; mask: bool [B, S]; denominator:
    tokens in the loss mask of the whole mini-batch. Values outside the mask are never read.

    Returns a 0-dimensional loss, and 0-dimensional sums that become what they are called when divided by the
    tokens in the mask: `ratio_mean`, `approx_kl` (k3 estimate of KL(old || new)), `clip_low_share` and
    `clip_high_share` (tokens whose gradient that bound removes), `tis_weight_mean`, `tis_clip_share` (tokens
    whose weight is cut to the cap).
    """
    new, old, sampler = new_logp[mask], old_logp[mask], sampler_logp[mask]
    advantage = advantages.unsqueeze(1).expand_as(mask)[mask]

    log_ratio = _bounded(new - old)
    ratio = log_ratio.exp()
    lower, upper = 1 - config.clip_low, 1 + config.clip_high
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(lower, upper) * advantage)

    weight = _bounded(old - sampler).exp().detach()
    tis_clip = torch.zeros_like(weight, dtype=torch.bool)
    if config.tis_cap is None:
        weight = torch.ones_like(weight)
    else:
        tis_clip = weight > config.tis_cap
        weight = weight.clamp(max=config.tis_cap)

    with torch.no_grad():
        sums = {
            "ratio_mean": ratio.sum(),
            "approx_kl": (ratio - 1 - log_ratio).sum(),
            "clip_low_share": ((ratio < lower) & (advantage < 0)).sum(),
            "clip_high_share": ((ratio > upper) & (advantage > 0)).sum(),
            "tis_weight_mean": weight.sum(),
            "tis_clip_share": tis_clip.sum(),
        }
    return -(weight * surrogate).sum() / denominator, sums


def negative_log_likelihood(logp: torch.Tensor, mask: torch.Tensor, denominator: int) -> torch.Tensor:
    """Minus the sum of logp float32 [B, S] over mask bool [B, S], divided by `denominator`."""
    return -logp[mask].sum() / denominator


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

"""The clipped policy objective. Pure: tensors in, loss and sums out.

For a response token with advantage A, log-probabilities under the learner, new (differentiated) and old
(before the update), and its weight w from `learner.correction` (a constant, which corrects for the sampler):

    r = exp(new - old)                                            probability ratio
    s = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)      clipped surrogate
    s = max(s, dual_clip * A)  where A < 0                        dual clip, if set

    loss = -[w * s]  +  kl.coefficient * [KL estimate]  -  entropy_coefficient * [entropy]

where [x] is the aggregate of x over the loss mask of the whole mini-batch, as `learner.aggregation` defines it.
The weight, and rejection, concern the surrogate alone; KL and entropy count for every token of the loss mask.

Sources: the clipped surrogate is PPO's (Schulman et al. 2017, arXiv 1707.06347, eq. 7). Separate bounds
("clip-higher") are DAPO's (Yu et al. 2025, arXiv 2503.14476, section 3.1), the dual clip is of Ye et al. 2020 (arXiv
1912.09729, section 3.4). A KL estimate in the loss is GRPO's (Shao et al. 2024, arXiv 2402.03300, eq. 3 and 4).
"""

from __future__ import annotations

import torch

from learner.aggregation import aggregate
from learner.batch import Totals, TrainBatch
from learner.config import ObjectiveConfig
from learner.correction import correct
from learner.kl import bounded, kl_estimate


def policy_loss(
    batch: TrainBatch,
    new_logp: torch.Tensor,
    entropy: torch.Tensor,
    totals: Totals,
    config: ObjectiveConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This micro-batch's share of the loss, and sums over its tokens.

    batch: the micro-batch, of whole sequences; new_logp, entropy: float32 [B, S], those under the learner, the
    entropy needs a gradient only if it has a coefficient; totals: of the whole mini-batch. Values outside the loss
    mask are never read.

    Returns a 0-dimensional loss, and 0-dimensional sums that become what they are called when divided by the
    tokens in the mask: `ratio_mean`, `log_ratio_abs`, `approx_kl` (k3 estimate of KL(old || new)), `clip_low_share`,
    `clip_high_share` and `dual_clip_share` (tokens whose gradient that bound removes), and with a KL penalty in the
    loss `reference_kl` (its estimate). Raises ValueError when that lacks the batch's `reference_logp`.
    """
    mask = batch.loss_mask
    new, old = new_logp[mask], batch.in_loss("old_logp")
    advantage = batch.in_loss("advantages")

    log_ratio = bounded(new - old)
    ratio = log_ratio.exp()
    lower, upper = 1 - config.clip_low, 1 + config.clip_high
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(lower, upper) * advantage)
    dual_clipped = torch.zeros_like(ratio, dtype=torch.bool)
    if config.dual_clip is not None:
        dual_clipped = (ratio > config.dual_clip) & (advantage < 0)
        surrogate = torch.where(dual_clipped, config.dual_clip * advantage, surrogate)

    weight = correct(batch.old_logp, batch.sampler_logp, mask, config.correction).weight
    loss = -aggregate(weight * surrogate, mask, totals, config)

    with torch.no_grad():
        sums = {
            "ratio_mean": ratio.sum(),
            "log_ratio_abs": log_ratio.abs().sum(),
            "approx_kl": (ratio - 1 - log_ratio).sum(),
            "clip_low_share": ((ratio < lower) & (advantage < 0)).sum(),
            "clip_high_share": ((ratio > upper) & (advantage > 0)).sum(),
            "dual_clip_share": dual_clipped.sum(),
        }
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * aggregate(entropy[mask], mask, totals, config)
    if config.kl.coefficient and config.kl.place == "loss":
        if batch.reference_logp is None:
            raise ValueError("a KL penalty in the loss needs the reference_logp of the batch, which is None")
        kl = kl_estimate(new, batch.in_loss("reference_logp"), config.kl.estimator)
        loss = loss + config.kl.coefficient * aggregate(kl, mask, totals, config)
        sums["reference_kl"] = kl.detach().sum()
    return loss, sums


def negative_log_likelihood(logp: torch.Tensor, mask: torch.Tensor, denominator: int) -> torch.Tensor:
    """Minus the sum of logp float32 [B, S] over mask bool [B, S], divided by `denominator`."""
    return -logp[mask].sum() / denominator

"""How far two engines disagree about the same tokens.

For each response token, d = log p(learner) - log p(sampler), of the sampled token; the tokens were drawn from
the sampler. The importance ratio of a token is exp(d).

Where a batch holds tokens of several weight versions (partial rollouts), the gap is that of the tokens by the weights
that the samplers had last: d of older ones is a change of the policy, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.routing import NO_ROUTE

if TYPE_CHECKING:
    from learner.batch import Scores
    from learner.config import ObjectiveConfig
    from rl.rollout import Sequences

QUANTILES = {"gap/p50": 0.5, "gap/p90": 0.9, "gap/p99": 0.99, "gap/p999": 0.999}
LOG_RATIO_BOUND = 20.0  # of d inside exponentials, so that none overflows: exp(20) = 4.9e8


class NonFiniteLogp(ArithmeticError):
    """Log-probabilities of response tokens that are infinite or not a number."""


def measure_gap(
    scores: Scores, sequences: Sequences, objective: ObjectiveConfig, version: int, behind: int
) -> dict[str, float]:
    """Of a step: `gap_statistics`, gap/outside_nucleus and, where both sides tell their experts, gap/route_mismatch, of
    the tokens that are at most `behind` versions older than the learner's `version`: 0, or 1 in a pipeline that is one
    step off, where d is never of the same weights. None of these where no token is so new.

    gap/older_abs_mean: mean |d| of the other tokens, where there are any. Raises NonFiniteLogp for any token.
    """
    present = sequences.loss_mask & (sequences.versions >= version - behind)
    older = sequences.loss_mask & ~present
    metrics = {}
    if older.any():
        learner, sampler = _finite(scores.logp[older], sequences.sampler_logp[older])
        metrics["gap/older_abs_mean"] = float(np.abs(learner - sampler).mean())
    if not present.any():
        return metrics
    metrics |= gap_statistics(scores.logp[present], sequences.sampler_logp[present], objective)
    metrics["gap/outside_nucleus"] = scores.outside_nucleus[present].double().mean().item()
    if sequences.routes is not None and scores.routes is not None:
        routes = sequences.routes
        if older.any():
            routes = torch.where(_computed(present, sequences.loss_mask)[..., None, None], routes, NO_ROUTE)
        metrics["gap/route_mismatch"] = route_mismatch(scores.routes, routes)
    return metrics


def _computed(written: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Tokens whose experts were chosen by the weights that wrote the tokens `written`; both bool [B, S]. What wrote a
    token has computed the one before it; what wrote the first of a response has computed the prompt.
    """
    before = loss_mask.cumsum(1) == 0
    first = written.gather(1, loss_mask.int().argmax(1, keepdim=True))
    next_one = torch.cat([written[:, 1:], torch.zeros_like(first)], 1)
    return torch.where(before, first, next_one)


def gap_statistics(
    learner_logp: torch.Tensor, sampler_logp: torch.Tensor, objective: ObjectiveConfig
) -> dict[str, float]:
    """Statistics of d over the response tokens of a whole step, in float64; log-probabilities in nats.

    learner_logp, sampler_logp: [T] real, the response tokens alone (select them by the loss mask).

    gap/mean: mean of d. gap/abs_mean: mean of |d|. gap/p50, gap/p90, gap/p99, gap/p999, gap/max: quantiles of
    |d|, exact, by sorting, linear between neighbours (`numpy.quantile`).

    gap/beyond_clip: share of tokens whose ratio exp(d) alone lies outside [1 - clip_low, 1 + clip_high],
    the bounds of `objective`.

    gap/ratio_mean: mean ratio; its expectation is 1. gap/k3: mean of exp(d) - 1 - d, the k3 estimate of
    KL(sampler || learner) (Schulman 2020, "Approximating KL Divergence"). gap/ess: effective sample size of
    the ratios w as a share of the tokens, (sum w)^2 / (T sum w^2) (Kish 1965). In these three d is bounded to
    +-LOG_RATIO_BOUND.

    Raises ValueError for other shapes and when there is no token, NonFiniteLogp with counts for values that
    are not finite.
    """
    learner, sampler = _finite(learner_logp, sampler_logp)
    d = learner - sampler
    distance = np.abs(d)
    bounded = np.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = np.exp(bounded)
    lower, upper = 1 - objective.clip_low, 1 + objective.clip_high
    quantiles = np.quantile(distance, list(QUANTILES.values()))
    statistics = {
        "gap/mean": d.mean(),
        "gap/abs_mean": distance.mean(),
        **dict(zip(QUANTILES, quantiles, strict=True)),
        "gap/max": distance.max(),
        "gap/beyond_clip": ((ratio < lower) | (ratio > upper)).mean(),
        "gap/ratio_mean": ratio.mean(),
        "gap/k3": (np.expm1(bounded) - bounded).mean(),
        "gap/ess": ratio.sum() ** 2 / (ratio.size * np.square(ratio).sum()),
    }
    return {name: float(value) for name, value in statistics.items()}


def route_mismatch(learner: torch.Tensor, sampler: torch.Tensor) -> float:
    """gap/route_mismatch: the share of tokens x layers for which the two name different sets of experts.

    learner, sampler: integer [B, S, layers, k]; only where the sampler's are known counts. Raises ValueError for
    other shapes and when none is known.
    """
    if learner.dim() != 4 or learner.shape != sampler.shape:
        raise ValueError(
            "routes of learner and sampler must both have shape [sequences, tokens, layers, k],"
            f" got {tuple(learner.shape)} and {tuple(sampler.shape)}"
        )
    known = (sampler != NO_ROUTE).all(-1)
    if not known.any():
        raise ValueError("there are no routes of the sampler to compare")
    differ = (learner.sort(-1).values != sampler.sort(-1).values).any(-1)
    return differ[known].double().mean().item()


def _finite(learner_logp: torch.Tensor, sampler_logp: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    if learner_logp.dim() != 1 or learner_logp.shape != sampler_logp.shape:
        raise ValueError(
            "log-probabilities of learner and sampler must both have shape [tokens],"
            f" got {tuple(learner_logp.shape)} and {tuple(sampler_logp.shape)}"
        )
    if not learner_logp.numel():
        raise ValueError("there are no response tokens to compare")
    learner, sampler = (x.detach().cpu().double().numpy() for x in (learner_logp, sampler_logp))
    wrong_learner, wrong_sampler = ~np.isfinite(learner), ~np.isfinite(sampler)
    if wrong_learner.any() or wrong_sampler.any():
        first = int(np.argmax(wrong_learner | wrong_sampler))
        raise NonFiniteLogp(
            f"log-probabilities that are not finite, of {learner.size} response tokens:"
            f" {wrong_learner.sum()} from the learner, {wrong_sampler.sum()} from the sampler;"
            f" first at token {first}: learner {learner[first]}, sampler {sampler[first]}"
        )
    return learner, sampler

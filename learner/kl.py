"""Estimates of the divergence of one policy from another, from the log-probabilities of sampled tokens. Pure.

With x = log p(token) - log q(token) of a token drawn from p, the mean of each of these estimates KL(p || q):

    k1 = x                      unbiased, negative half of the time
    k2 = x^2 / 2                biased, small variance
    k3 = exp(-x) - 1 + x        unbiased, never negative

Source: Schulman 2020, "Approximating KL Divergence". The mean of the gradient of an estimate is not always the
gradient of the divergence (Tang and Munos 2025, arXiv 2506.09477): over tokens from p, that of k2 is; that of
k3 is the gradient of KL(q || p); that of k1 is zero. So k1 belongs into the reward, k2 or k3 into the loss.
"""

from __future__ import annotations

import torch

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: far outside any clip range, far inside FP32


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """log_ratio, cut to +-LOG_RATIO_BOUND so that its exponential is finite; no gradient beyond the bound."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_estimate(logp: torch.Tensor, reference_logp: torch.Tensor, estimator: str) -> torch.Tensor:
    """The estimate of KL(policy || reference) for each token, of the shape of both arguments, in nats.

    Raises ValueError for an unknown estimator.
    """
    x = logp - reference_logp
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            x = bounded(x)
            return torch.expm1(-x) + x
    raise ValueError(f"estimator={estimator!r} must be one of k1, k2, k3")

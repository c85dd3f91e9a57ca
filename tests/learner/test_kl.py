from __future__ import annotations

import math

import pytest
import torch

from learner.config import KL_ESTIMATORS
from learner.kl import kl_estimate

P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
Q = torch.tensor([0.4, 0.4, 0.1, 0.1], dtype=torch.float64)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p.log() - q.log())).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_by_the_policy_the_unbiased_estimates_are_the_divergence(estimator: str) -> None:
    mean = (P * kl_estimate(P.log(), Q.log(), estimator)).sum()
    assert mean.item() == pytest.approx(divergence(P, Q).item(), rel=1e-12)


def test_close_to_each_other_all_estimates_agree() -> None:
    near = (P.log() + 1e-4 * torch.tensor([1.0, -1.0, 2.0, 0.5])).softmax(0)
    means = [(P * kl_estimate(P.log(), near.log(), estimator)).sum().item() for estimator in KL_ESTIMATORS]
    assert means == pytest.approx([divergence(P, near).item()] * 3, rel=1e-3)


def test_what_the_mean_gradient_of_each_estimate_is() -> None:
    """k2: that of KL(policy || reference); k3: that of KL(reference || policy); k1: nothing."""
    logits = P.log().clone().requires_grad_()
    expected = {
        "k1": torch.zeros(4, dtype=torch.float64),
        "k2": torch.autograd.grad(divergence(logits.softmax(0), Q), logits)[0],
        "k3": torch.autograd.grad(divergence(Q, logits.softmax(0)), logits)[0],
    }
    for estimator, gradient in expected.items():
        loss = (P * kl_estimate(logits.log_softmax(0), Q.log(), estimator)).sum()
        found = torch.autograd.grad(loss, logits)[0]
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_equal_policies_have_none_and_distant_ones_a_finite_one(estimator: str) -> None:
    logp = torch.tensor([-1.0, -500.0, 0.0])
    assert not kl_estimate(logp, logp, estimator).any()
    far = kl_estimate(logp, torch.tensor([-900.0, 0.0, 0.0]), estimator)
    assert bool(far.isfinite().all())


def test_small_differences_are_not_lost_to_rounding() -> None:
    x = torch.tensor([1e-4])
    assert kl_estimate(x, torch.zeros(1), "k3").item() == pytest.approx(0.5e-8, rel=1e-2)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="estimator='k4' must be one of k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_k3_never_pushes_a_policy_further_away_beyond_the_bound() -> None:
    logp = torch.tensor([-math.inf, -100.0, 100.0]).clamp(min=-1000).requires_grad_()
    kl_estimate(logp, torch.zeros(3), "k3").sum().backward()
    assert not logp.grad.any()

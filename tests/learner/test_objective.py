from __future__ import annotations

import math

import pytest
import torch

from learner.config import ObjectiveConfig
from learner.objective import negative_log_likelihood, policy_loss

CONFIG = ObjectiveConfig(clip_low=0.2, clip_high=0.28, tis_cap=2.0)


def loss_of(
    new: float, old: float, sampler: float, advantage: float, config: ObjectiveConfig = CONFIG
) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient with respect to `new`, and sums, of a single token."""
    variable = torch.tensor([[new]], requires_grad=True)
    loss, sums = policy_loss(
        variable,
        torch.tensor([[old]]),
        torch.tensor([[sampler]]),
        torch.tensor([advantage]),
        torch.tensor([[True]]),
        1,
        config,
    )
    loss.backward()
    return loss.item(), variable.grad.item(), {name: float(value) for name, value in sums.items()}


def test_agrees_with_the_formula_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (6, 9)
    old = -torch.rand(shape, generator=generator) * 3
    new = old + 0.6 * torch.randn(shape, generator=generator)
    sampler = old + 0.6 * torch.randn(shape, generator=generator)
    advantages = torch.randn(6, generator=generator)
    mask = torch.rand(shape, generator=generator) > 0.3
    loss, sums = policy_loss(new, old, sampler, advantages, mask, 100, CONFIG)

    expected = dict.fromkeys(sums, 0.0)
    total = 0.0
    for i, t in mask.nonzero().tolist():
        n, o, s, a = (x.double().item() for x in (new[i, t], old[i, t], sampler[i, t], advantages[i]))
        r, w = math.exp(n - o), math.exp(o - s)
        total -= min(w, 2.0) * min(r * a, min(max(r, 0.8), 1.28) * a)
        expected["ratio_mean"] += r
        expected["approx_kl"] += r - 1 - (n - o)
        expected["clip_low_share"] += r < 0.8 and a < 0
        expected["clip_high_share"] += r > 1.28 and a > 0
        expected["tis_weight_mean"] += min(w, 2.0)
        expected["tis_clip_share"] += w > 2.0
    assert loss.item() == pytest.approx(total / 100, rel=1e-5)
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(expected, rel=1e-4)
    assert expected["clip_low_share"] and expected["clip_high_share"] and expected["tis_clip_share"]


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.0, 1.0, False),
        (1.0, -1.0, False),
        (1.27, 1.0, False),
        (1.29, 1.0, True),  # above the upper bound, and a step would go further up
        (1.29, -1.0, False),  # above, but the step comes back
        (0.81, -1.0, False),
        (0.79, -1.0, True),
        (0.79, 1.0, False),
    ],
)
def test_gradient_in_and_out_of_the_clip_range(ratio: float, advantage: float, clipped: bool) -> None:
    _, gradient, sums = loss_of(-1.0 + math.log(ratio), -1.0, -1.0, advantage)
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-5)
    assert sums["clip_low_share"] + sums["clip_high_share"] == clipped


@pytest.mark.parametrize(
    ("old_minus_sampler", "weight"), [(0.5, math.exp(0.5)), (3.0, 2.0), (-1.0, math.exp(-1))]
)
def test_importance_weight_is_truncated_and_constant(old_minus_sampler: float, weight: float) -> None:
    loss, gradient, sums = loss_of(-1.0, -1.0, -1.0 - old_minus_sampler, 1.0)
    assert loss == pytest.approx(-weight, rel=1e-5)
    assert gradient == pytest.approx(-weight, rel=1e-5)
    assert sums["tis_clip_share"] == (old_minus_sampler == 3.0)


def test_importance_weight_passes_no_gradient_to_old_logp() -> None:
    old = torch.tensor([[-1.0]], requires_grad=True)
    arguments = (torch.tensor([[-2.0]]), torch.tensor([1.0]), torch.tensor([[True]]), 1)
    policy_loss(torch.tensor([[-1.0]]), old, *arguments, ObjectiveConfig(tis_cap=10.0))[0].backward()
    # Only the ratio depends on old: d(-w * exp(new - old))/d(old) = w * r, with w = exp(1) and r = 1.
    assert old.grad.item() == pytest.approx(math.e, rel=1e-5)


def test_without_truncated_importance_sampling_the_sampler_does_not_matter() -> None:
    config = ObjectiveConfig(tis_cap=None)
    assert loss_of(-1.0, -1.1, -9.0, 1.0, config)[:2] == loss_of(-1.0, -1.1, -1.1, 1.0, config)[:2]


def test_far_apart_log_probabilities_stay_finite() -> None:
    for new, old, sampler in ((0.0, -500.0, 0.0), (-500.0, 0.0, -900.0), (0.0, 0.0, -500.0)):
        loss, gradient, sums = loss_of(new, old, sampler, -1.0)
        assert all(math.isfinite(value) for value in (loss, gradient, *sums.values()))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_values_outside_the_mask_change_nothing(poison: float) -> None:
    mask = torch.tensor([[False, True, True, False]])
    clean = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    results = []
    for outside in (0.0, poison):
        new, old, sampler = (clean.where(mask, outside) + shift for shift in (0.1, 0.0, 0.2))
        new.requires_grad_()
        loss, sums = policy_loss(new, old, sampler, torch.tensor([1.5]), mask, 2, CONFIG)
        nll = negative_log_likelihood(new, mask, 2)
        (loss + nll).backward()
        results.append([loss, nll, *sums.values(), *new.grad.flatten()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][-4] == 0 and results[0][-3] != 0


def test_shares_of_a_split_batch_add_up() -> None:
    generator = torch.Generator().manual_seed(3)
    new, old, sampler = (-torch.rand(8, 5, generator=generator) for _ in range(3))
    advantages = torch.randn(8, generator=generator)
    mask = torch.rand(8, 5, generator=generator) > 0.4
    count = int(mask.sum())
    whole, sums = policy_loss(new, old, sampler, advantages, mask, count, CONFIG)
    halves = [
        policy_loss(new[part], old[part], sampler[part], advantages[part], mask[part], count, CONFIG)
        for part in (slice(0, 3), slice(3, 8))
    ]
    assert sum(loss.item() for loss, _ in halves) == pytest.approx(whole.item(), rel=1e-6)
    for name, total in sums.items():
        assert sum(part[name].item() for _, part in halves) == pytest.approx(total.item(), rel=1e-6)


def test_negative_log_likelihood_is_a_token_mean() -> None:
    logp = torch.tensor([[-1.0, -2.0], [-4.0, -8.0]])
    mask = torch.tensor([[True, False], [True, True]])
    assert negative_log_likelihood(logp, mask, 3).item() == pytest.approx(13 / 3)

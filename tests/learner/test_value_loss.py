from __future__ import annotations

import math

import pytest
import torch

from learner.config import CriticConfig
from learner.value_loss import value_loss

ONE = torch.tensor([[True]])


def loss_of(value: float, old: float, target: float, clip: float | None = 0.2) -> tuple[float, float, bool]:
    """Loss, gradient and whether the bound took the gradient away, of one token."""
    variable = torch.tensor([[value]], requires_grad=True)
    loss, sums = value_loss(
        variable, torch.tensor([[old]]), torch.tensor([[target]]), ONE, 1, CriticConfig(value_clip=clip)
    )
    loss.backward()
    return loss.item(), variable.grad.item(), bool(sums["value_clip_share"])


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9, False),  # within the bound: half the squared error
        (0.5, 0.0, 1.0, 0.32, 0.0, True),  # moved too far towards the target: nothing more to gain
        (-0.5, 0.0, 1.0, 1.125, -1.5, False),  # moved away from it: pulled back in full
        (1.5, 0.0, 1.0, 0.32, 0.0, True),  # beyond the target, but the bounded value is worse
        (3.0, 0.0, 1.0, 2.0, 2.0, False),  # far beyond it: the value itself is worse
    ],
)
def test_closed_forms(
    value: float, old: float, target: float, loss: float, gradient: float, clipped: bool
) -> None:
    found = loss_of(value, old, target)
    assert found[:2] == pytest.approx((loss, gradient), rel=1e-5)
    assert found[2] is clipped


def test_without_a_bound_it_is_half_the_squared_error() -> None:
    assert loss_of(9.0, 0.0, 1.0, clip=None) == (32.0, 8.0, False)


def test_gradient_agrees_with_finite_differences_and_parts_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(4, 5, generator=generator) > 0.3
    values.requires_grad_()
    count, config = int(mask.sum()), CriticConfig(value_clip=0.5)
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, mask, count, config)[0], (values,), atol=1e-8
    )
    whole, sums = value_loss(values, old, returns, mask, count, config)
    parts = [
        value_loss(values[r], old[r], returns[r], mask[r], count, config)
        for r in (slice(2, 4), slice(0, 1), slice(1, 2))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=1e-12, atol=0)
    for name, total in sums.items():
        assert sum(float(part[name]) for _, part in parts) == pytest.approx(float(total), rel=1e-12)
    assert 0 < sums["value_clip_share"] < count


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_values_outside_the_mask_change_nothing(poison: float) -> None:
    mask = torch.tensor([[True, False, True]])
    results = []
    for outside in (0.0, poison):
        values, old, returns = (
            torch.tensor([[1.0, 2.0, 3.0]]).where(mask, outside) + shift for shift in (0.0, 0.5, -2.0)
        )
        values.requires_grad_()
        loss, sums = value_loss(values, old, returns, mask, 2, CriticConfig())
        loss.backward()
        results.append([loss, *sums.values(), *values.grad.flatten()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

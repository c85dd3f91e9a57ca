from __future__ import annotations

import pytest
import torch
from torch import nn

from learner.config import LearnerConfig
from learner.optimizer import Optimizer

SETTINGS = LearnerConfig(
    lr=1e-2, betas=(0.9, 0.99), eps=1e-7, weight_decay=0.1, grad_clip=0.5, warmup_steps=4
)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (5, 7), "experts": (2, 3, 4), "norm": (7,)}
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(p.shape, generator=generator) for n, p in parameters().items()}


def test_agrees_with_adamw_written_out_in_float64() -> None:
    found = parameters()
    optimizer = Optimizer(found.items(), SETTINGS)
    weights = {name: p.detach().double() for name, p in parameters().items()}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(6):
        grads = {name: g.double() for name, g in gradients(step).items()}
        norm = torch.sqrt(sum((g**2).sum() for g in grads.values())).item()
        lr = 1e-2 * min(1, (step + 1) / 4)
        for name, grad in grads.items():
            grad = grad * min(1.0, 0.5 / norm)
            decay = 0.1 if weights[name].dim() > 1 else 0.0
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.99 * second[name] + 0.01 * grad**2
            direction = (first[name] / (1 - 0.9 ** (step + 1))) / (
                (second[name] / (1 - 0.99 ** (step + 1))).sqrt() + 1e-7
            )
            weights[name] = weights[name] * (1 - lr * decay) - lr * direction
            found[name].grad = gradients(step)[name]
        assert optimizer.step() == pytest.approx((norm, lr), rel=1e-6)
        assert all(p.grad is None for p in found.values())
    for name, weight in weights.items():
        torch.testing.assert_close(found[name].detach().double(), weight, rtol=1e-5, atol=1e-6)


def test_without_a_bound_gradients_are_not_clipped() -> None:
    results = []
    for clip in (0.0, 1e9):
        found = parameters()
        optimizer = Optimizer(found.items(), LearnerConfig(lr=0.1, grad_clip=clip))
        for name, gradient in gradients(0).items():
            found[name].grad = gradient
        optimizer.step()
        results.append(found["matrix"].detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=0)


def test_a_learning_rate_replaces_the_schedule_for_one_step() -> None:
    found = parameters()
    optimizer = Optimizer(found.items(), SETTINGS)
    for step, lr in enumerate((0.5, None)):
        for name, gradient in gradients(step).items():
            found[name].grad = gradient
        assert optimizer.step(lr)[1] == pytest.approx(0.5 if lr else 1e-2 * 2 / 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float) -> None:
    found = parameters()
    optimizer = Optimizer(found.items(), SETTINGS)
    for name, gradient in gradients(0).items():
        found[name].grad = gradient
    found["experts"].grad[0, 0, :2] = value
    with pytest.raises(FloatingPointError, match=r"experts \(2 elements\)"):
        optimizer.step()
    assert optimizer.steps == 0 and not optimizer.state()
    assert all(torch.equal(p, q) for p, q in zip(found.values(), parameters().values(), strict=True))
    assert all(p.grad is None for p in found.values())


def test_bfloat16_parameters_follow_float32_masters() -> None:
    low = parameters(torch.bfloat16)
    high = {name: nn.Parameter(p.detach().float()) for name, p in low.items()}
    optimizers = [Optimizer(group.items(), LearnerConfig(lr=1e-5, grad_clip=0.0)) for group in (low, high)]
    for step in range(20):
        for name, gradient in gradients(step).items():
            gradient = gradient.bfloat16()
            for part in (gradient, gradient * 2.0**-10):  # a sum that bfloat16 cannot hold
                (low[name] * part).sum().backward()
                (high[name] * part.float()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    # Twenty steps of 1e-5 are lost when added to bfloat16 weights one by one; the masters keep them.
    for name, parameter in low.items():
        assert torch.equal(optimizers[0].masters[name], high[name])
        assert torch.equal(parameter, high[name].bfloat16())
        assert parameter.grad is None
    start = parameters(torch.bfloat16)
    assert any(not torch.equal(low[name].float(), high[name]) for name in low)
    assert any(not torch.equal(high[name], start[name].float()) for name in low)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_restored_exactly(dtype: torch.dtype) -> None:
    def advance(found: dict[str, nn.Parameter], optimizer: Optimizer, step: int) -> None:
        for name, gradient in gradients(step).items():
            (found[name] * gradient.to(dtype)).sum().backward()
        optimizer.step()

    whole = parameters(dtype)
    reference = Optimizer(whole.items(), SETTINGS)
    for step in range(2):
        advance(whole, reference, step)
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in whole.items()}
    optimizer = Optimizer(resumed.items(), SETTINGS)
    state = {name: tensor.clone() for name, tensor in reference.state().items()}
    optimizer.load_state(state, reference.steps)
    for step in range(2, 5):
        advance(whole, reference, step)
        advance(resumed, optimizer, step)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert all(torch.equal(tensor, optimizer.state()[name]) for name, tensor in reference.state().items())

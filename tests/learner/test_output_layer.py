"""The output layer with its tokens' scores in one operation, beside float64."""

from __future__ import annotations

import pytest
import torch

from learner.output_layer import scored_tokens
from tests.learner.test_widened import DEVICES, relative

ROWS, HIDDEN = 11, 64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("vocab", "temperature", "chunk"), [(5000, 1.0, 4), (5000, 0.6, 100), (17, 3.0, 1)])
def test_scores_and_gradients(
    device: str, entropy_gradient: bool, vocab: int, temperature: float, chunk: int
) -> None:
    """Triton's interpreter computes them on a CPU. Logits are as far apart as those of a trained model."""
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).bfloat16().to(device).requires_grad_()
    weight = torch.randn(vocab, HIDDEN, generator=generator).bfloat16().to(device).requires_grad_()
    ids = torch.randint(vocab, (ROWS,), generator=generator).to(device)
    direction = torch.randn(2, ROWS, generator=generator).to(device)
    logp, entropy = scored_tokens(hidden, weight, ids, temperature, chunk, entropy_gradient)
    assert entropy.requires_grad is entropy_gradient and logp.dtype is entropy.dtype is torch.float32

    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    distribution = torch.distributions.Categorical(logits=exact[0] @ exact[1].T / temperature)
    torch.testing.assert_close(logp.double(), distribution.log_prob(ids), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), distribution.entropy(), rtol=1e-5, atol=1e-5)
    loss = (direction[0] * logp).sum() + (direction[1] * entropy).sum() * entropy_gradient
    expected = (direction[0] * distribution.log_prob(ids)).sum()
    expected = expected + (direction[1] * distribution.entropy()).sum() * entropy_gradient
    found = torch.autograd.grad(loss, (hidden, weight))
    for own, other in zip(found, torch.autograd.grad(expected, exact), strict=True):
        assert own.dtype is torch.bfloat16 and relative(own, other) < 2**-8  # one rounding to BF16


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_stays_so(device: str) -> None:
    hidden = torch.ones(3, HIDDEN, dtype=torch.bfloat16, device=device)
    hidden[1, 0], hidden[2, 0] = torch.nan, torch.inf
    weight = torch.ones(5, HIDDEN, dtype=torch.bfloat16, device=device)
    logp, _ = scored_tokens(hidden, weight, torch.zeros(3, dtype=torch.int64, device=device), 1.0, 2, False)
    assert logp.isfinite().tolist() == [True, False, False]


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_have_no_scores_and_a_gradient_of_zero(device: str) -> None:
    hidden = torch.zeros(0, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.ones(5, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    ids = torch.zeros(0, dtype=torch.int64, device=device)
    logp, entropy = scored_tokens(hidden, weight, ids, 1.0, 2, True)
    assert logp.shape == entropy.shape == (0,)
    (logp.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()

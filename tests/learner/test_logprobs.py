from __future__ import annotations

import math

import pytest
import torch

from learner.logprobs import token_logprobs

ROWS, HIDDEN, VOCAB = 9, 16, 23
ALL = 1 << 30


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
def test_agrees_with_float64(dtype: torch.dtype, temperature: float) -> None:
    hidden, weight, ids = operands(dtype)
    logp, entropy = token_logprobs(hidden, weight, ids, temperature, ALL)
    distribution = torch.distributions.Categorical(logits=hidden.double() @ weight.double().T / temperature)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), distribution.log_prob(ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), distribution.entropy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows_per_chunk", [1, 2, 4, ROWS])
def test_chunks_change_neither_values_nor_gradients(rows_per_chunk: int) -> None:
    results = []
    for logits_bytes in (ALL, rows_per_chunk * VOCAB * 4):
        hidden, weight, ids = operands(torch.float32)
        hidden.requires_grad_()
        weight.requires_grad_()
        logp, entropy = token_logprobs(hidden, weight, ids, 0.8, logits_bytes)
        (logp * torch.arange(1.0, ROWS + 1)).sum().backward()
        results.append((logp, entropy, hidden.grad, weight.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


def test_the_entropy_of_equal_logits_is_that_of_a_uniform_distribution() -> None:
    _, entropy = token_logprobs(
        torch.zeros(1, HIDDEN), torch.ones(VOCAB, HIDDEN), torch.tensor([0]), 1.0, ALL
    )
    assert entropy.item() == pytest.approx(math.log(VOCAB), rel=1e-6)


def test_no_rows_are_fine() -> None:
    hidden, weight, ids = operands(torch.float32)
    logp, entropy = token_logprobs(hidden[:0], weight, ids[:0], 1.0, ALL)
    assert logp.shape == entropy.shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_no_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_logprobs(*operands(torch.float32), temperature, ALL)

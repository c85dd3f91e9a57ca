from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from transformers import TopPLogitsWarper

from learner.logprobs import TokenScores, nucleus, score_logits, token_scores

ROWS, HIDDEN, VOCAB = 9, 16, 23
ALL = 1 << 30


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    logits_bytes: int = ALL,
    entropy_gradient: bool = False,
) -> TokenScores:
    settings = {"temperature": temperature, "top_p": top_p, "entropy_gradient": entropy_gradient}
    return token_scores(hidden, weight, ids, logits_bytes=logits_bytes, **settings)


def nucleus_by_definition(probabilities: torch.Tensor, top_p: float, also: int) -> list[int]:
    """Tokens in order of their probability until it reaches top_p, and one more if it is not among them."""
    chosen: list[int] = []
    for token in probabilities.argsort(descending=True).tolist():
        if probabilities[chosen].sum() >= top_p:
            break
        chosen.append(token)
    return chosen if also in chosen else [*chosen, also]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
def test_agrees_with_float64(dtype: torch.dtype, temperature: float) -> None:
    hidden, weight, ids = operands(dtype)
    found = scores(hidden, weight, ids, temperature)
    distribution = torch.distributions.Categorical(logits=hidden.double() @ weight.double().T / temperature)
    assert found.logp.dtype == found.entropy.dtype == torch.float32
    torch.testing.assert_close(found.logp.double(), distribution.log_prob(ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), distribution.entropy(), rtol=0, atol=1e-5)
    assert not found.outside_nucleus.any()


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_agrees_with_its_definition_in_float64(temperature: float, top_p: float) -> None:
    hidden, weight, _ = operands(torch.float32)
    logits = hidden.double() @ weight.double().T / temperature
    inside = 0
    for token in range(VOCAB):
        found = scores(hidden, weight, torch.full((ROWS,), token), temperature, top_p)
        for row, probabilities in enumerate(logits.softmax(-1)):
            chosen = nucleus_by_definition(probabilities, top_p, token)
            kept = probabilities[chosen] / probabilities[chosen].sum()
            assert found.logp[row].item() == pytest.approx(kept[chosen.index(token)].log().item(), abs=1e-5)
            assert found.entropy[row].item() == pytest.approx(-(kept * kept.log()).sum().item(), abs=1e-5)
            own = nucleus_by_definition(probabilities, top_p, int(probabilities.argmax()))
            assert found.outside_nucleus[row].item() == (token not in own)
            inside += token in own
    assert 0 < inside < ROWS * VOCAB


@pytest.mark.parametrize("top_p", [0.1, 0.3, 0.7, 0.95])
def test_the_nucleus_is_that_of_transformers(top_p: float) -> None:
    logits = 2 * torch.randn(200, 500, generator=torch.Generator().manual_seed(3))
    expected = TopPLogitsWarper(top_p)(None, logits) > -math.inf
    assert torch.equal(nucleus(logits, top_p), expected)


def test_the_nucleus_that_just_reaches_top_p() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    found = {top_p: int(nucleus(logits, top_p).sum()) for top_p in (0.01, 0.5, 0.51, 0.75, 0.76, 0.99)}
    assert found == {0.01: 1, 0.5: 1, 0.51: 2, 0.75: 2, 0.76: 3, 0.99: 4}


def test_a_token_outside_the_nucleus_is_added_to_it_and_counted() -> None:
    logits = torch.tensor([0.6, 0.3, 0.08, 0.02]).log().expand(4, 4)
    found = score_logits(logits, torch.arange(4), 0.85)
    assert found.outside_nucleus.tolist() == [False, False, True, True]
    expected = torch.tensor([0.6 / 0.9, 0.3 / 0.9, 0.08 / 0.98, 0.02 / 0.92])
    torch.testing.assert_close(found.logp, expected.log(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("probabilities", "inside", "outside"),
    [
        # The likelier tokens reach top_p by themselves, or just do not.
        (lambda shift: [0.7 - shift, 0.2 + shift, 0.1], 0.2 / 0.9, 0.2 / 0.9),
        # Another token takes its place, and it stands beside that one.
        (lambda shift: [0.5, 0.2 + shift, 0.2 - shift, 0.1], 0.2 / 0.7, 0.2 / 0.9),
    ],
)
def test_a_token_just_outside_the_nucleus_is_about_as_likely_as_just_inside(
    probabilities: Callable[[float], list[float]], inside: float, outside: float
) -> None:
    """Where probability zero outside would be a cliff."""
    for shift, expected in ((1e-7, inside), (-1e-7, outside)):
        logits = torch.tensor([probabilities(shift)], dtype=torch.float64).log()
        found = score_logits(logits, torch.tensor([1]), 0.7)
        assert found.outside_nucleus.item() == (shift < 0)
        assert found.logp.item() == pytest.approx(math.log(expected), abs=1e-5)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_gradients_agree_with_finite_differences(top_p: float) -> None:
    """Of log-probability and entropy with respect to the logits, in float64; the nucleus stays what it is."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(6, 8, generator=generator, dtype=torch.float64)
    ids = torch.tensor([0, 1, 2, 3, 4, 5])
    logits.requires_grad_()
    assert score_logits(logits, ids, 0.7).outside_nucleus.any()
    assert torch.autograd.gradcheck(
        lambda x: score_logits(x, ids, top_p, entropy_gradient=True)[:2], (logits,), eps=1e-6, atol=1e-7
    )


def test_the_gradient_of_the_entropy_in_closed_form() -> None:
    """dH/dz_i = -p_i (log p_i + H)."""
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits.requires_grad_()
    found = score_logits(logits, torch.zeros(5, dtype=torch.int64), 1.0, entropy_gradient=True)
    found.entropy.sum().backward()
    p = logits.detach().softmax(-1)
    entropy = -(p * p.log()).sum(-1, keepdim=True)
    torch.testing.assert_close(logits.grad, -p * (p.log() + entropy), rtol=1e-10, atol=1e-14)


def test_the_entropy_carries_no_gradient_unless_asked_for() -> None:
    hidden, weight, ids = operands(torch.float32)
    hidden.requires_grad_()
    assert not scores(hidden, weight, ids).entropy.requires_grad
    asked = scores(hidden, weight, ids, entropy_gradient=True)
    assert asked.entropy.requires_grad
    assert torch.equal(asked.entropy, scores(hidden, weight, ids).entropy)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize("rows_per_chunk", [1, 4, ROWS])
def test_chunks_change_neither_values_nor_gradients(rows_per_chunk: int, top_p: float) -> None:
    results = []
    for logits_bytes in (ALL, rows_per_chunk * VOCAB * 4):
        hidden, weight, ids = operands(torch.float32)
        hidden.requires_grad_()
        weight.requires_grad_()
        found = scores(hidden, weight, ids, 0.8, top_p, logits_bytes, entropy_gradient=True)
        ((found.logp - 0.5 * found.entropy) * torch.arange(1.0, ROWS + 1)).sum().backward()
        results.append((*found, hidden.grad, weight.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


def test_the_entropy_of_equal_logits_is_that_of_a_uniform_distribution() -> None:
    found = scores(torch.zeros(1, HIDDEN), torch.ones(VOCAB, HIDDEN), torch.tensor([0]))
    assert found.entropy.item() == pytest.approx(math.log(VOCAB), rel=1e-6)


def test_no_rows_are_fine() -> None:
    hidden, weight, ids = operands(torch.float32)
    assert [part.shape for part in scores(hidden[:0], weight, ids[:0], top_p=0.9)] == [(0,)] * 3


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_no_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        scores(*operands(torch.float32), temperature)


@pytest.mark.parametrize("top_p", [0.0, -1.0, 1.1, math.nan])
def test_a_top_p_that_is_no_probability_is_refused(top_p: float) -> None:
    with pytest.raises(ValueError, match=r"top_p must lie in \(0, 1\]"):
        scores(*operands(torch.float32), 1.0, top_p)

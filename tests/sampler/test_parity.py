"""Log-probabilities against transformers, which shares no code with the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from sampler.config import SamplingConfig
from tests.sampler.conftest import (
    FAMILIES,
    MAX_LEN,
    VOCAB,
    MakeModel,
    MakeSampler,
    gap,
    prompts,
    reference_logp,
)

SEEDS = [[10 * i + j for j in range(3)] for i in range(6)]


@pytest.fixture(scope="module")
def transformers_model(model_folder: MakeModel) -> Callable[..., PreTrainedModel]:
    def load(family: str, dtype: str = "float32") -> PreTrainedModel:
        folder = model_folder(family)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    return load


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32(family: str, temperature: float, sampler_for: MakeSampler, transformers_model: Any) -> None:
    sampling = SamplingConfig(max_tokens=16, temperature=temperature)
    responses = sampler_for(family, "fp32").generate(prompts(), SEEDS, sampling)
    expected = reference_logp(transformers_model(family), prompts(), responses, temperature)
    assert gap(responses, expected).max() < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_experts_in_an_fp32_model(
    family: str, sampler_for: MakeSampler, transformers_model: Any
) -> None:
    """Operands of 8 bits move log-probabilities by some 2^-8, and by more where a router is near a tie."""
    responses = sampler_for(family, "bf16").generate(prompts(), SEEDS, SamplingConfig(max_tokens=16))
    found = gap(responses, reference_logp(transformers_model(family), prompts(), responses))
    assert 1e-5 < found.mean() < 2**-7
    assert found.quantile(0.95) < 2**-5


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_model(family: str, sampler_for: MakeSampler, transformers_model: Any) -> None:
    """transformers rounds logits to BF16, and router logits as well: now and then it takes another expert."""
    sampler = sampler_for(family, "bf16", "bfloat16")
    responses = sampler.generate(prompts(), SEEDS, SamplingConfig(max_tokens=16))
    found = gap(responses, reference_logp(transformers_model(family, "bfloat16"), prompts(), responses))
    assert found.median() < 0.02
    assert found.mean() < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_router_and_output_logits_of_a_bf16_model_are_fp32(
    family: str, sampler_for: MakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_for(family, "bf16", "bfloat16")
    model = sampler._model
    block = model.model.layers[1].mlp if family == "qwen3_moe" else model.model.layers[1].block_sparse_moe
    # As vLLM sets it for a Hopper GPU, where its router would compute by a product of its own.
    monkeypatch.setattr(block.gate, "allow_cublas_router_gemm", True, raising=False)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = [
        block.gate.register_forward_hook(lambda _, args, output: seen.update(router=(args[0], output[0]))),
        model.logits_processor.register_forward_hook(
            lambda _, args, output: seen.update(output=(args[1], output))
        ),
    ]
    sampler.generate(prompts(), [[0]] * 6, SamplingConfig(max_tokens=1))
    for hook in hooks:
        hook.remove()
    weights = {"router": block.gate.weight, "output": model.lm_head.weight[:VOCAB]}
    for name, (x, logits) in seen.items():
        assert x.dtype == weights[name].dtype == torch.bfloat16
        assert logits.dtype == torch.float32
        exact = F.linear(x.double(), weights[name].double())
        torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
        assert (logits != logits.bfloat16()).float().mean() > 0.9
    assert seen.keys() == weights.keys()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_generation(temperature: float, sampler_for: MakeSampler) -> None:
    sampler = sampler_for("qwen3_moe", "fp32")
    sampling = SamplingConfig(max_tokens=MAX_LEN - 47, temperature=temperature)  # the longest fill the model
    responses = sampler.generate(prompts(), SEEDS, sampling)
    sequences = [
        [*prompt, *c.token_ids] for prompt, own in zip(prompts(), responses, strict=True) for c in own
    ]
    assert max(map(len, sequences)) == MAX_LEN
    lengths = [len(prompt) for prompt in prompts() for _ in range(3)]
    scores = sampler.score(sequences, lengths, temperature)
    generated = [c.logp for own in responses for c in own]
    assert [len(own) for own in scores] == [len(own) for own in generated]
    pairs = zip(scores, generated, strict=True)
    assert max((torch.tensor(a) - torch.tensor(b)).abs().max() for a, b in pairs) < 2e-5


def test_top_p_renormalises(sampler_for: MakeSampler, transformers_model: Any) -> None:
    """The nucleus, computed here by its definition: the likeliest tokens whose sum first reaches p."""
    sampling = SamplingConfig(max_tokens=1, top_p=0.7)
    responses = sampler_for("qwen3_moe", "fp32").generate(prompts(), SEEDS, sampling)
    model = transformers_model("qwen3_moe")
    for prompt, own in zip(prompts(), responses, strict=True):
        with torch.no_grad():
            probs = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        ranked, ids = probs.sort(descending=True)
        size = int((ranked.cumsum(0) < 0.7).sum()) + 1
        nucleus = dict(zip(ids[:size].tolist(), (ranked[:size] / ranked[:size].sum()).tolist(), strict=True))
        for completion in own:
            assert completion.logp[0] == pytest.approx(
                torch.tensor(nucleus[completion.token_ids[0]]).log().item(), abs=2e-5
            )


def test_tokens_are_drawn_from_the_distribution(sampler_for: MakeSampler, transformers_model: Any) -> None:
    draws = 4096
    prompt = prompts()[2]
    [drawn] = sampler_for("qwen3_moe", "fp32").generate(
        [prompt], [list(range(draws))], SamplingConfig(max_tokens=1, temperature=0.8)
    )
    with torch.no_grad():
        logits = transformers_model("qwen3_moe")(torch.tensor([prompt])).logits[0, -1]
    expected = draws * (logits / 0.8).softmax(-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=VOCAB)
    common = expected >= 5
    observed = torch.cat((counts[common], counts[~common].sum()[None]))
    wanted = torch.cat((expected[common], expected[~common].sum()[None]))
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    degrees = len(wanted) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # four standard deviations

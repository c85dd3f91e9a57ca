"""A vLLM that computes its experts itself: it takes new weights by its own reload, and says what it is."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from kernels.digest import fast_digests
from kernels.precision_map import PrecisionMap
from sampler.config import SamplingConfig
from sampler.model_check import check_model
from sampler.stock import own_map
from tests.sampler.conftest import (
    LAYERS,
    MakeModel,
    StartSampler,
    gap,
    prompts,
    reference_logp,
    tiny_config,
)
from tests.sampler.test_updates import respond, update, with_version
from tests.sampler.wire import wire_tensors

OWN: PrecisionMap = own_map(LAYERS, "float32")


def test_new_weights_and_the_old_ones_again(start_sampler: StartSampler, model_folder: MakeModel) -> None:
    """Log-probabilities by transformers; digests of what was handed to the engine; the same bits when it goes back."""
    family = "qwen3_moe"
    sampler = start_sampler(model_folder(family), OWN, stock=True)
    old, new = (wire_tensors(model_folder(family, seed), OWN) for seed in (0, 1))
    before = respond(sampler)
    calls = sampler.report().expert_calls

    assert update(sampler, new) == fast_digests(new)
    after = respond(sampler)
    assert {version for own in after for completion in own for version in completion.versions} == {1}
    model = AutoModelForCausalLM.from_pretrained(model_folder(family, 1)).eval()
    assert gap(after, reference_logp(model, prompts(), after)).max() < 2e-5

    assert update(sampler, old) == fast_digests(old)
    assert with_version(respond(sampler), 0) == before

    report = sampler.report()
    assert report.precision_map == OWN
    assert report.backend.startswith("vllm 0.")
    assert report.expert_layers == LAYERS
    assert report.expert_calls > calls > 0
    with pytest.raises(ValueError, match="a stock engine does not say which experts it chose"):
        sampler.generate(prompts(1), [[0]], SamplingConfig(return_routes=True))


def test_a_model_whose_reload_goes_wrong_is_refused(model_folder: MakeModel) -> None:
    with pytest.raises(ValueError, match="must be a Qwen3MoeForCausalLM with an output layer of its own"):
        check_model(model_folder("mixtral"), OWN, tiny_config(stock=True))
    check_model(model_folder("qwen3_moe"), OWN, tiny_config(stock=True))

"""The engine on a GPU, its experts by the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.digest import fast_digests
from kernels.precision_map import PrecisionMap
from sampler.config import SamplingConfig
from sampler.engine import Completion, Sampler
from tests.sampler.conftest import FAMILIES, LAYERS, MakeModel, StartSampler, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SEEDS = [[3 * i, 3 * i + 1] for i in range(6)]
MAP = PrecisionMap.resolve(LAYERS, named_spec("minite"))


@pytest.fixture(scope="module", params=FAMILIES)
def sampler(
    request: pytest.FixtureRequest, model_folder: MakeModel, start_sampler: StartSampler
) -> Iterator[Sampler]:
    family = request.param
    # vLLM lets only one engine of a process sleep.
    sleep = "keep" if family == "mixtral" else "off"
    yield start_sampler(model_folder(family), MAP, device="cuda", dtype="bfloat16", sleep=sleep)


def generated(sampler: Sampler) -> list[list[Completion]]:
    return sampler.generate(prompts(), SEEDS, SamplingConfig(max_tokens=16))


def test_experts_run_by_the_triton_kernels(sampler: Sampler) -> None:
    generated(sampler)
    report = sampler.report()
    assert report.backend.startswith("triton") and report.expert_calls > 0


def test_the_same_call_gives_the_same_bits(sampler: Sampler) -> None:
    assert generated(sampler) == generated(sampler)


def test_scores_are_near_those_of_generation(sampler: Sampler) -> None:
    """Not the same bits: BF16 attention over a prompt sums in another order than token by token."""
    responses = generated(sampler)
    sequences = [[*p, *c.token_ids] for p, own in zip(prompts(), responses, strict=True) for c in own]
    lengths = [len(p) for p, own in zip(prompts(), responses, strict=True) for _ in own]
    scores = sampler.score(sequences, lengths)
    found = [c.logp for own in responses for c in own]
    pairs = zip(scores, found, strict=True)
    gaps = torch.cat([(torch.tensor(a) - torch.tensor(b)).abs() for a, b in pairs])
    assert gaps.median() < 0.1


def test_routes_are_those_of_every_token(sampler: Sampler) -> None:
    responses = sampler.generate(prompts(), SEEDS, SamplingConfig(max_tokens=4, return_routes=True))
    for prompt, own in zip(prompts(), responses, strict=True):
        for completion in own:
            assert completion.routes is not None
            assert len(completion.routes) == len(prompt) + len(completion.token_ids)
            assert (completion.routes[:-1] >= 0).all()


def test_sleep_gives_memory_away_and_changes_nothing(sampler: Sampler) -> None:
    if sampler.config.sleep == "off":
        pytest.skip("this engine cannot sleep")
    before, responses = fast_digests(sampler.weights.tensors()), generated(sampler)
    addresses = {name: tensor.data_ptr() for name, tensor in sampler.weights.tensors().items()}
    free = torch.cuda.mem_get_info()[0]
    sampler.sleep(keep=True)
    assert torch.cuda.mem_get_info()[0] - free >= int(sampler.config.kv_cache_gib * 2**30) // 2
    with pytest.raises(RuntimeError, match=r"nothing is generated: the cache is asleep"):
        generated(sampler)
    sampler.wake_weights()
    assert fast_digests(sampler.weights.tensors()) == before
    assert {name: tensor.data_ptr() for name, tensor in sampler.weights.tensors().items()} == addresses
    sampler.wake_cache()
    assert generated(sampler) == responses


def test_bf16_experts_run_by_grouped_products(model_folder: MakeModel, start_sampler: StartSampler) -> None:
    """As the learner's do; a call repeated gives the same bits."""
    specs = PrecisionMap.resolve(LAYERS, named_spec("bf16"))
    sampler = start_sampler(model_folder(FAMILIES[0]), specs, device="cuda", dtype="bfloat16")
    first = generated(sampler)
    assert sampler.report().backend == "grouped_bf16" and first == generated(sampler)

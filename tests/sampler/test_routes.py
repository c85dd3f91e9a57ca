"""The experts that come with responses, against a computation of every sequence by itself and by transformers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels.routing import NO_ROUTE
from sampler.config import SamplingConfig
from sampler.engine import Completion, Sampler
from sampler.routes import RouteRecorder
from tests.sampler.conftest import FAMILIES, LAYERS, MakeModel, MakeSampler, StartSampler, prompts

SEEDS = [[10 * i + j for j in range(3)] for i in range(6)]
SAMPLING = SamplingConfig(max_tokens=40, stop_token_ids=(5, 11, 17), return_routes=True)


@torch.no_grad()
def router_choices(model: Any, sequence: list[int]) -> list[list[set[int]]]:
    """By transformers: for each token but the last the set of its experts in each layer."""
    model.config.output_router_logits = True
    k = model.config.num_experts_per_tok
    logits = model(torch.tensor([sequence]), output_router_logits=True).router_logits
    chosen = [layer.float().topk(k, dim=-1).indices.tolist() for layer in logits]
    return [[set(chosen[layer][t]) for layer in range(LAYERS)] for t in range(len(sequence) - 1)]


def sequences_of(responses: list[list[Completion]]) -> list[tuple[list[int], Completion]]:
    pairs = zip(prompts(), responses, strict=True)
    return [([*prompt, *completion.token_ids], completion) for prompt, own in pairs for completion in own]


@pytest.mark.parametrize("family", FAMILIES)
def test_routes_are_those_of_the_model(
    family: str, sampler_for: MakeSampler, model_folder: MakeModel
) -> None:
    """Prompt tokens too, also where keys and values came from the cache: prompts of up to 47 tokens, three requests
    each, blocks of 32."""
    responses = sampler_for(family, "fp32").generate(prompts(), SEEDS, SAMPLING)
    model = AutoModelForCausalLM.from_pretrained(model_folder(family), dtype=torch.float32).eval()
    tokens = differing = 0
    lengths = set()
    for sequence, completion in sequences_of(responses):
        routes = completion.routes
        assert routes is not None and routes.dtype == np.int16
        assert routes.shape == (len(sequence), LAYERS, model.config.num_experts_per_tok)
        assert (routes[-1] == NO_ROUTE).all() and (routes[:-1] != NO_ROUTE).all()
        expected = router_choices(model, sequence)
        found = [[set(layer) for layer in token] for token in routes[:-1].tolist()]
        tokens += len(found)
        differing += sum(a != b for a, b in zip(found, expected, strict=True))
        lengths.add(len(completion.token_ids))
    assert len(lengths) > 3  # they end at different steps
    assert differing <= tokens // 500  # near a tie the last bit decides


def test_cached_prompts_have_the_routes_of_computed_ones(
    sampler_for: MakeSampler, start_sampler: StartSampler, model_folder: MakeModel
) -> None:
    cached = sampler_for("qwen3_moe", "minite")
    computed = start_sampler(model_folder("qwen3_moe"), cached.precision_map, prefix_caching=False)
    prompt = prompts()[5]
    [with_cache] = cached.generate([prompt], [[1, 2, 3, 4]], SAMPLING)
    assert cached._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.enable_caching
    [without] = computed.generate([prompt], [[1, 2, 3, 4]], SAMPLING)
    shared = len(prompt)
    for a, b in zip(with_cache, without, strict=True):
        assert (np.sort(a.routes[:shared]) == np.sort(b.routes[:shared])).mean() > 0.99
    first = with_cache[0].routes[:32]
    assert all(
        (other.routes[:32] == first).all() for other in with_cache
    )  # the very block that all of them read
    assert len({tuple(token.flatten()) for token in first}) > 8  # not constant


def test_slots_descend_by_coefficient(sampler_for: MakeSampler) -> None:
    """Of the first token, which depends on nothing else: by hand from the first layer's router."""
    sampler = sampler_for("qwen3_moe", "fp32")
    seen: list[torch.Tensor] = []
    gate = sampler._model.model.layers[0].mlp.gate
    hook = gate.register_forward_hook(lambda _, __, output: seen.append(output[0]))
    [[completion]] = sampler.generate([[3]], [[0]], SamplingConfig(max_tokens=1, return_routes=True))
    hook.remove()
    [logits] = seen
    assert completion.routes[0, 0].tolist() == logits[0].argsort(descending=True)[:3].tolist()


def test_routes_change_nothing_and_come_only_when_asked_for(sampler_for: MakeSampler) -> None:
    sampler = sampler_for("qwen3_moe", "minite")
    plain = SamplingConfig(max_tokens=SAMPLING.max_tokens, stop_token_ids=SAMPLING.stop_token_ids)
    assert sampler.generate(prompts()[:1], [[]], SAMPLING) == [[]]
    without = sampler.generate(prompts(), SEEDS, plain)
    with_routes = sampler.generate(prompts(), SEEDS, SAMPLING)
    again = sampler.generate(prompts(), SEEDS, SAMPLING)
    assert without == with_routes == again
    assert all(completion.routes is None for own in without for completion in own)
    for (_, a), (_, b) in zip(sequences_of(with_routes), sequences_of(again), strict=True):
        assert np.array_equal(a.routes, b.routes)


def test_preempted_requests_keep_their_routes(
    sampler_for: MakeSampler, start_sampler: StartSampler, model_folder: MakeModel
) -> None:
    """A cache that holds fewer tokens than the requests have: some are thrown out and computed again."""
    roomy = sampler_for("qwen3_moe", "fp32")
    bytes_of_a_block = 2 * LAYERS * 2 * 32 * 32 * 4
    small = start_sampler(
        model_folder("qwen3_moe"), roomy.precision_map, kv_cache_gib=14 * bytes_of_a_block / 2**30
    )
    sampling = SamplingConfig(max_tokens=40, return_routes=True)
    expected = roomy.generate(prompts(), SEEDS, sampling)
    scheduler = small._llm.llm_engine.engine_core.engine_core.scheduler
    with patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as preempt:
        found = small.generate(prompts(), SEEDS, sampling)
    assert preempt.call_count > 0
    same = total = 0
    for (_, a), (_, b) in zip(sequences_of(found), sequences_of(expected), strict=True):
        assert (a.routes[:-1] != NO_ROUTE).all()
        if a.token_ids == b.token_ids:
            same += int((np.sort(a.routes) == np.sort(b.routes)).all(axis=(1, 2)).sum())
            total += len(a.routes)
    assert total > 500 and same > 0.99 * total


def test_a_token_without_routes_is_an_error(sampler_for: MakeSampler) -> None:
    sampler: Sampler = sampler_for("qwen3_moe", "fp32")
    recorder = RouteRecorder(sampler._recorder._runner, sampler._experts, LAYERS)
    rows = np.zeros((3, LAYERS, 3), np.int16)
    recorder._log = [(["0"], np.array([0, 3]), np.array([0, 1, 3]), rows)]  # of position 2 nothing is known
    with pytest.raises(RuntimeError, match="request 0: the experts of 1 of 5 tokens are not known"):
        recorder.take({"0": 5})

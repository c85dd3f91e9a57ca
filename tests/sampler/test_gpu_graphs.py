"""Decoding steps as CUDA graphs, over experts in tiles that a weight sync writes in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from kernels.catalogue import named_spec
from kernels.experts import StoredLayout
from kernels.precision_map import PrecisionMap
from sampler.config import SamplingConfig
from sampler.engine import Completion, Sampler
from tests.sampler.conftest import LAYERS, StartSampler, prompts, qwen_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SEEDS = [[3 * i, 3 * i + 1] for i in range(6)]  # twelve sequences: four rows of the larger graph hold none
MAP = PrecisionMap.resolve(LAYERS, named_spec("minite"))


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory, start_sampler: StartSampler) -> Iterator[Sampler]:
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp("model")
    Qwen3MoeForCausalLM(qwen_config(hidden_size=128, moe_intermediate_size=128)).save_pretrained(folder)
    yield start_sampler(folder, MAP, device="cuda", dtype="bfloat16", cuda_graph_sizes=(4, 16))


def generated(sampler: Sampler, **changes: object) -> list[list[Completion]]:
    return sampler.generate(prompts(), SEEDS, SamplingConfig(max_tokens=16, **changes))  # type: ignore[arg-type]


def test_steps_are_replayed_and_rows_without_tokens_count_for_nothing(sampler: Sampler) -> None:
    assert sampler.weights.layout is StoredLayout.TILES
    first = generated(sampler)
    calls = sampler.report().expert_calls
    assert generated(sampler) == first
    assert sampler.report().expert_calls - calls <= 2 * LAYERS  # prompts are launched
    sequences = [[*p, *c.token_ids] for p, own in zip(prompts(), first, strict=True) for c in own]
    lengths = [len(p) for p, own in zip(prompts(), first, strict=True) for _ in own]
    pairs = zip(sampler.score(sequences, lengths), [c.logp for own in first for c in own], strict=True)
    gaps = torch.cat([(torch.tensor(a) - torch.tensor(b)).abs() for a, b in pairs])
    assert gaps.median() < 0.1


def test_with_routes_steps_are_launched(sampler: Sampler) -> None:
    for prompt, own in zip(prompts(), generated(sampler, return_routes=True), strict=True):
        for completion in own:
            assert completion.routes is not None and len(completion.routes) == len(prompt) + 16
            assert (completion.routes[:-1] >= 0).all()


def test_a_replay_computes_with_what_was_written_in_place(sampler: Sampler) -> None:
    before, live = generated(sampler), sampler.weights.tensors()
    own = {name: tensor.clone() for name, tensor in live.items()}
    words = live["model.layers.0.experts.w2.words"]
    words.copy_(words.flip(0))  # the experts in another order
    sampler.weights.refresh()
    assert generated(sampler) != before
    for name, tensor in own.items():
        live[name].copy_(tensor)
    sampler.weights.refresh()
    assert generated(sampler) == before

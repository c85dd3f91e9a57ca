"""A sampler of two processes, each with a GPU, against one of one: expert layers, scores, weight syncs.

A sync over NCCL needs a third GPU, for the learner; with two it shares one, and chunks go through Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from learner.config import LearnerConfig
from rl.actor_group import ActorGroup, start_group, wait_until_ready
from rl.cluster import Remote, local_cluster, wait
from rl.config.cluster import SyncConfig
from rl.placement import Place
from rl.sync.weight_sync import WeightSync
from sampler.config import SamplingConfig
from tests.rl.sampler_actors import OpenLearner, OpenSampler
from tests.sampler.conftest import LAYERS, prompts, qwen_config, tiny_config

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two NVIDIA GPUs")]
NCCL = pytest.mark.skipif(GPUS < 3, reason="needs three NVIDIA GPUs: NCCL takes no two members on one")
MAP = PrecisionMap.resolve(LAYERS, named_spec("minite"), last_layers_bf16=1)
HIDDEN, EXPERTS, TOP_K = 256, 16, 4
WIDTHS = {"hidden_size": HIDDEN, "moe_intermediate_size": 128, "head_dim": 64, "num_experts": EXPERTS}
SEEDS = [[1], [2], [3], [4], [5], [6]]
# Partial products of attention are rounded to BF16 before they are added, which moves activations by their last bit,
# flips roundings to 4 bits and now and then a choice of experts (`tests/learner/test_gpu_layouts.py`).
MEDIAN = 0.25


@dataclass
class World:
    """one, two: samplers of as many processes."""

    one: Remote
    two: ActorGroup
    learner: Remote

    def of_both(self, method: str, *args: Any) -> list[Any]:
        """What each of the two processes answers, when both are asked together."""
        return wait([getattr(member.later, method)(*args) for member in self.two.members])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place: Path = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    config = qwen_config(**WIDTHS, num_experts_per_tok=TOP_K)
    Qwen3MoeForCausalLM(config).save_pretrained(place / "model")

    def start(actor: type, processes: int, gpus: str, *arguments: Any) -> Any:
        settings = tiny_config(device="cuda", dtype="bfloat16", tensor_parallel=processes)
        places = [Place(local_rank=rank, visible=tuple(gpus.split(","))) for rank in range(processes)]
        given = (place / "model", MAP, *(arguments or (settings,)))
        name = f"{actor.__name__}_{processes}"
        return start_group(actor, name, settings, place, *given, places=places)

    with local_cluster(256):
        learning = LearnerConfig(device="cuda", dtype="bfloat16")
        engines = [
            start(OpenSampler, 1, "0"),
            start(OpenSampler, 2, "0,1"),
            start(OpenLearner, 1, str(GPUS - 1), learning, 0),
        ]
        wait_until_ready(engines)
        yield World(*engines)


@pytest.mark.parametrize("tokens", [1, 3, 64, 700, 5000])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_expert_layer_has_the_bits_of_one_gpu(world: World, layer: int, tokens: int) -> None:
    """Under `minite`, and under `bf16` in the last layer; expert 15 has no token."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS - 1, generator=generator).argsort(1)[:, :TOP_K].int()
    slots = layer, x, ids, torch.rand(tokens, TOP_K, generator=generator).softmax(1)
    expected = world.one.expert_layer(*slots)
    assert expected.abs().max() > 0.01
    for found in world.of_both("expert_layer", *slots):
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_experts_run_by_the_triton_kernels(world: World) -> None:
    assert "triton" in world.two.report().backend


def test_processes_write_the_same_and_score_as_one_gpu(world: World) -> None:
    found, other = world.of_both(
        "generate", prompts(), SEEDS, SamplingConfig(max_tokens=16, return_routes=True)
    )
    assert found == other
    assert_scores_are_near(world, found)


def assert_scores_are_near(world: World, responses: list[list[Any]]) -> None:
    """Those of one GPU, of the same tokens."""
    sequences = [[*p, *own[0].token_ids] for p, own in zip(prompts(), responses, strict=True)]
    lengths = [len(prompt) for prompt in prompts()]
    (scores, others), expected = (
        world.of_both("score", sequences, lengths),
        world.one.score(sequences, lengths),
    )
    assert scores == others
    off = (torch.tensor(scores) - torch.tensor(expected)).abs()
    print(f"scores: median {off.median():.1e}, largest {off.max():.1e}")
    assert off.median() < MEDIAN


@pytest.mark.parametrize(
    "transport, codec",
    [
        ("ray", "packed"),
        ("ray", "delta"),
        pytest.param("process_group", "packed", marks=NCCL),
        pytest.param("process_group", "delta", marks=NCCL),
    ],
)
def test_a_weight_sync_brings_every_rank_its_part(world: World, transport: str, codec: str) -> None:
    """Attested, and then as a sampler of one process that holds all of it, which shares GPU 0."""
    version = max(sampler.held().version for sampler in (world.one, world.two))
    settings = SyncConfig(transport=transport, codec=codec)
    sync = WeightSync(world.learner, [world.two], MAP, settings)
    for step in (1, 2):
        world.learner.step(version + step)
        metrics = sync.sync(version + step)
    if codec == "delta":
        assert metrics["sync/changed_share"] < 1
    WeightSync(world.learner, [world.one], MAP, SyncConfig()).sync(version + 2)
    contents, (shards, _) = world.of_both("content"), world.of_both("shards")
    for name, tensor in world.one.content().items():
        parts = [content[name] for content in contents]
        whole = [torch.cat(parts, shards[name].dim)] if name in shards else parts
        assert all(torch.equal(part.view(torch.uint8), tensor.view(torch.uint8)) for part in whole), name
    responses = world.two.generate(prompts(), SEEDS, SamplingConfig(max_tokens=16))
    assert set(responses[0][0].versions) == {version + 2}
    assert_scores_are_near(world, responses)

"""A learner of two processes behind one handle: scores, updates, checkpoints and weight sync, against one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from learner.batch import TrainBatch
from learner.config import LearnerConfig, ObjectiveConfig
from learner.initialize import initialize
from learner.policy import Policy
from rl.actor_group import ActorGroup, largest, start_group
from rl.cluster import local_cluster, start_actor, stop_actor
from rl.config.cluster import SyncConfig
from rl.rollout import Sequences
from rl.sync.weight_sync import WeightSync
from tests.rl.group_actors import OpenLearner, PlainSampler

pytestmark = pytest.mark.slow

MAP = PrecisionMap.resolve(2, named_spec("minite"), last_layers_bf16=1)
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 32,
}
LAYOUT = {"tensor_parallel": 2, "expert_parallel": 2}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_cluster(80):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    initialize(folder, MODEL, seed=0)
    return folder


def sequences() -> Sequences:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (6, 9), generator=generator)
    lengths = torch.tensor([9, 5, 7, 9, 3, 6])
    positions = torch.arange(9)
    mask = (positions >= 2) & (positions < lengths[:, None])
    logp = -3 + torch.rand(tokens.shape, generator=generator)
    return Sequences(tokens, lengths, mask, logp, torch.where(mask, 1, -1).int())


def batch(of: Sequences) -> TrainBatch:
    advantages = torch.linspace(-1, 1, len(of.tokens))
    return TrainBatch(of.tokens, of.lengths, of.loss_mask, of.sampler_logp, of.sampler_logp, advantages)


def test_it_works_as_one_learner(folder: Path, tmp_path: Path) -> None:
    config, objective, given = LearnerConfig(lr=1e-3, **LAYOUT), ObjectiveConfig(), sequences()
    group = start_group(OpenLearner, "learner", config, tmp_path, folder, MAP, config, 0)
    assert isinstance(group, ActorGroup)
    alone = Policy(folder, MAP, LearnerConfig(lr=1e-3), 0)
    parts = (given.tokens, given.lengths, given.loss_mask)
    scores, expected = group.score(given, 1.0, 1.0), alone.score(*parts, 1.0)
    torch.testing.assert_close(scores.logp, expected.logp, rtol=1e-4, atol=1e-4)
    assert group.report().expert_layers == 2

    sampler = start_actor(PlainSampler, "sampler", 1, tmp_path / "log", group.layout(), MAP)
    assert largest([sampler, group], "memory_mib") == largest([group], "memory_mib") == 101.0
    assert largest([sampler], "memory_mib") == 100.0
    sync = WeightSync(group, [sampler], MAP, SyncConfig(codec="delta", bucket_mib=1))
    sync.sync(1)
    metrics, found = (
        group.update(batch(given), objective, 1.0, 1.0),
        alone.update(batch(given), objective, 1.0),
    )
    assert metrics == pytest.approx(found, rel=1e-3, abs=1e-4)
    assert sync.sync(2)["sync/changed_share"] < 1

    group.checkpoint(tmp_path / "checkpoint")
    alone.restore(tmp_path / "checkpoint")  # the weights of the group, in one process
    content = sampler.content()
    for tensor_name, tensor in alone.export():
        assert torch.equal(content[tensor_name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
    group.restore(tmp_path / "checkpoint")
    operands = WeightSync(group, [sampler], MAP, SyncConfig(codec="bf16", restarts=0))
    operands.sync(3)

    broken = batch(given)
    broken.old_logp[broken.loss_mask] = float("nan")
    with pytest.raises(FloatingPointError, match="values of old_logp"):
        group.update(broken, objective, 1.0, 1.0)
    group.save_hf(tmp_path / "model")
    again = Policy(tmp_path / "model", MAP, LearnerConfig(), 0)
    assert torch.equal(again.score(*parts, 1.0).logp, alone.score(*parts, 1.0).logp)

    stop_actor(group.members[1])
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        group.score(given, 1.0, 1.0)
    assert time.monotonic() - started < 60
    stop_actor(group.members[0])
    stop_actor(sampler)

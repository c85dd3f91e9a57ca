"""Routing replay between the two real engines: what the sampler chose is what the learner computes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from kernels.routing import NO_ROUTE
from learner.batch import TrainBatch
from learner.config import LearnerConfig, ObjectiveConfig
from learner.initialize import initialize
from learner.policy import Policy
from rl.gap import route_mismatch
from rl.rollout import Sequences, to_sequences
from rl.rollout_store import load_rollouts
from tests.learner.experts_taken import experts_taken
from tests.rl import routed_rollouts
from tests.rl.routed_rollouts import LAYERS, VOCAB

EXPERTS, TOP_K = 8, 2
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
Engines = tuple[Policy, Sequences]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """A learner under FP32 experts, and what a sampler of the same weights under NVFP4 experts wrote, in a process of
    its own: the two choose different experts often.
    """
    place = tmp_path_factory.mktemp("replay")
    initialize(place / "model", MODEL, seed=0)
    command = [sys.executable, "-m", routed_rollouts.__name__, str(place / "model"), str(place / "rollouts")]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    batch = load_rollouts(place / "rollouts", routed_rollouts.prompt_at)
    assert batch is not None
    fp32 = PrecisionMap.resolve(LAYERS, named_spec("fp32"))
    return Policy(place / "model", fp32, LearnerConfig(lr=1e-3), seed=0), to_sequences(batch.groups)


def arguments(sequences: Sequences) -> tuple[torch.Tensor, ...]:
    return sequences.tokens, sequences.lengths, sequences.loss_mask


def test_with_r3_the_learner_takes_exactly_the_experts_of_the_sampler(engines: Engines) -> None:
    policy, sequences = engines
    routes = sequences.routes
    assert routes is not None
    positions = torch.arange(sequences.tokens.shape[1])
    known = (routes != NO_ROUTE).all(-1)
    assert torch.equal(known, (positions < sequences.lengths[:, None] - 1)[..., None].expand_as(known))
    given = routes.long().sort(-1).values

    own = experts_taken(policy, lambda: policy.score(*arguments(sequences), 1.0), sequences.lengths)
    assert (own[known] != given[known]).any(-1).float().mean() > 0.01  # the engines differ, and it shows
    score = lambda: policy.score(*arguments(sequences), 1.0, routes=routes)  # noqa: E731
    assert torch.equal(experts_taken(policy, score, sequences.lengths)[known], given[known])

    logp = policy.score(*arguments(sequences), 1.0).logp
    batch = TrainBatch(
        *arguments(sequences), sequences.sampler_logp, logp, torch.randn(len(logp)), routes=routes
    )
    update = lambda: policy.update(batch, ObjectiveConfig(), 1.0)  # noqa: E731
    assert torch.equal(experts_taken(policy, update, sequences.lengths)[known], given[known])


def test_the_mismatch_is_measured_and_a_planted_one_found(engines: Engines) -> None:
    policy, sequences = engines
    routes = sequences.routes
    assert routes is not None
    found = policy.score(*arguments(sequences), 1.0, return_routes=True).routes
    natural = route_mismatch(found, routes)
    assert 0.01 < natural < 0.5
    planted = replace(sequences, routes=routes.clone())
    agreeing = (found.sort(-1).values == routes.sort(-1).values).all(-1) & (routes != NO_ROUTE).all(-1)
    row, position, layer = (int(index) for index in agreeing.nonzero()[17])
    others = [e for e in range(EXPERTS) if e not in routes[row, position, layer].tolist()]
    planted.routes[row, position, layer, 0] = others[0]
    tokens = int((routes != NO_ROUTE).all(-1).sum())
    assert route_mismatch(found, planted.routes) == pytest.approx(natural + 1 / tokens)


def test_replay_brings_the_engines_together(engines: Engines) -> None:
    """Where the engines choose different experts, they are further apart; with the same experts, nearer."""
    policy, sequences = engines
    mask = sequences.loss_mask
    plain = policy.score(*arguments(sequences), 1.0).logp
    replayed = policy.score(*arguments(sequences), 1.0, routes=sequences.routes).logp
    gaps = [(logp - sequences.sampler_logp)[mask].abs().mean().item() for logp in (plain, replayed)]
    assert gaps[1] < gaps[0]

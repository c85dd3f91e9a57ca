"""Routing replay between the two real engines, in this process: what the sampler chose is what the learner computes."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, if it is not yet

from collections.abc import Callable
from dataclasses import replace
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
from rl.data.problem import Problem
from rl.data.prompts import Prompt
from rl.gap import route_mismatch
from rl.rewards.score import Score
from rl.rollout import Group, Rollout, Sequences, to_sequences
from sampler.config import SamplerConfig, SamplingConfig
from sampler.engine import Sampler

LAYERS, EXPERTS, TOP_K, VOCAB = 3, 8, 2, 61
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
    """A learner under FP32 experts, and the sequences that a sampler of the same weights under NVFP4 experts wrote: the
    two choose different experts often. Prompts of up to 47 tokens share cache blocks of 32."""
    folder = tmp_path_factory.mktemp("model") / "model"
    initialize(folder, MODEL, seed=0)
    policy = Policy(folder, PrecisionMap.resolve(LAYERS, named_spec("fp32")), LearnerConfig(lr=1e-3), seed=0)
    sampler = Sampler(
        folder,
        PrecisionMap.resolve(LAYERS, named_spec("minite")),
        SamplerConfig(
            max_model_len=96, max_num_seqs=32, max_num_batched_tokens=512, kv_cache_gib=1 / 64, threads=1
        ),
    )
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(VOCAB, (2 + 9 * i,), generator=generator).tolist() for i in range(6)]
    sampling = SamplingConfig(max_tokens=20, stop_token_ids=(5, 11), return_routes=True)
    responses = sampler.generate(prompts, [[10 * i + j for j in range(3)] for i in range(6)], sampling)
    groups = [
        Group(
            Prompt(n, Problem(str(n), "q", "a", "s"), tuple(prompt)),
            tuple(Rollout(completion, Score.of(True)) for completion in own),
        )
        for n, (prompt, own) in enumerate(zip(prompts, responses, strict=True))
    ]
    return policy, to_sequences(groups)


def experts_taken(policy: Policy, call: Callable[[], Any], sequences: Sequences) -> torch.Tensor:
    """int64 [B, S, layers, k] in ascending order, of one micro-batch, which is sorted by length."""
    seen: list[torch.Tensor] = []
    hooks = [
        experts.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1].clone()))
        for experts in policy.model.experts()
    ]
    call()
    for hook in hooks:
        hook.remove()
    assert len(seen) == LAYERS
    order = sequences.lengths.sort(descending=True, stable=True).indices
    width = int(sequences.lengths.max())
    taken = torch.stack([ids.view(width, len(order), TOP_K) for ids in seen], 2).transpose(0, 1)
    return taken[order.argsort()].sort(-1).values


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

    own = experts_taken(policy, lambda: policy.score(*arguments(sequences), 1.0), sequences)
    assert (own[known] != given[known]).any(-1).float().mean() > 0.01  # the engines differ, and it shows
    score = lambda: policy.score(*arguments(sequences), 1.0, routes=routes)  # noqa: E731
    assert torch.equal(experts_taken(policy, score, sequences)[known], given[known])

    logp = policy.score(*arguments(sequences), 1.0).logp
    batch = TrainBatch(
        *arguments(sequences), sequences.sampler_logp, logp, torch.randn(len(logp)), routes=routes
    )
    update = lambda: policy.update(batch, ObjectiveConfig(), 1.0)  # noqa: E731
    assert torch.equal(experts_taken(policy, update, sequences)[known], given[known])


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

"""Routing replay: the experts are those that are given, everything else is the learner's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.routing import NO_ROUTE
from learner import convert
from learner.batch import TrainBatch
from learner.config import ObjectiveConfig
from learner.policy import Policy
from learner.replay import check_routes
from tests.learner.conftest import LAYERS, MODELS, MakeFolder, Sequences, config, hidden_states, precision_map
from tests.learner.experts_taken import experts_taken
from tests.learner.test_parity import logits, relative, transformers_model
from tests.learner.test_policy import gradients, make_batch

EXPERTS, TOP_K = 8, 2  # of the Qwen3-MoE model


def make_policy(
    model_folder: MakeFolder, spec: str = "fp32", family: str = "qwen3_moe", **changes: Any
) -> Policy:
    return Policy(model_folder(family), precision_map(spec), config(**changes), seed=0)


def random_routes(sequences: Sequences, experts: int = EXPERTS, seed: int = 3) -> torch.Tensor:
    """int16 [B, S, layers, k]: experts that no router would choose; NO_ROUTE in padding, at each last token, and at
    some tokens in one layer."""
    tokens, lengths, _ = sequences
    generator = torch.Generator().manual_seed(seed)
    routes = torch.rand(*tokens.shape, LAYERS, experts, generator=generator).argsort(-1)[..., :TOP_K].short()
    routes[torch.arange(tokens.shape[1]) >= lengths[:, None] - 1] = NO_ROUTE
    routes[0, 3:5, 1] = NO_ROUTE
    return routes


def test_the_experts_are_those_replayed(model_folder: MakeFolder, sequences: Sequences) -> None:
    """In a scoring pass and in an update, whose weights have changed; where there is no route, the router's own."""
    tokens, lengths, _ = sequences
    policy = make_policy(model_folder, "minite")
    routes = random_routes(sequences)
    given = routes.long().sort(-1).values

    taken = experts_taken(policy, lambda: policy.score(*sequences, 1.0, routes=routes), lengths)
    known = (given != NO_ROUTE).all(-1)
    assert torch.equal(taken[known], given[known])

    scores = policy.score(*sequences, 1.0, routes=routes, return_routes=True)
    own = scores.routes.long().sort(-1).values
    valid = (torch.arange(tokens.shape[1]) < lengths[:, None])[..., None] & ~known
    assert valid.sum() > len(tokens) and torch.equal(taken[valid], own[valid])
    assert (own[known] != given[known]).any(-1).float().mean() > 0.5  # what is planted shows
    assert (scores.logp - policy.score(*sequences, 1.0).logp).abs().max() > 0.1
    assert (scores.routes[torch.arange(tokens.shape[1]) >= lengths[:, None]] == NO_ROUTE).all()

    batch = replace(make_batch(policy, sequences), routes=routes)
    for _ in range(2):
        taken = experts_taken(policy, lambda: policy.update(batch, ObjectiveConfig(), 1.0), lengths)
        assert torch.equal(taken[known], given[known])


def test_the_load_of_the_experts_is_that_of_the_routes(
    model_folder: MakeFolder, sequences: Sequences
) -> None:
    policy = make_policy(model_folder)
    routes = policy.score(*sequences, temperature=1.0, return_routes=True).routes
    assert routes is not None
    layers = [routes[:, :, layer][routes[:, :, layer] != NO_ROUTE] for layer in range(LAYERS)]
    counts = torch.stack([torch.bincount(chosen.long(), minlength=EXPERTS) for chosen in layers])
    load = policy.expert_load()
    assert load is not None and torch.equal(load, counts)
    assert int(load.sum()) == LAYERS * TOP_K * int(sequences[1].sum())
    assert policy.expert_load() is None


def test_replay_of_the_own_choices_changes_no_bit(model_folder: MakeFolder, sequences: Sequences) -> None:
    policy = make_policy(model_folder, "minite")
    scores = policy.score(*sequences, 1.0, return_routes=True)
    replayed = policy.score(*sequences, 1.0, routes=scores.routes, return_routes=True)
    assert torch.equal(replayed.logp, scores.logp) and torch.equal(replayed.routes, scores.routes)
    batch = make_batch(policy, sequences)
    _, plain = gradients(policy, batch)
    _, same = gradients(make_policy(model_folder, "minite"), replace(batch, routes=scores.routes))
    assert all(torch.equal(plain[name], same[name]) for name in plain)


def test_in_a_later_update_the_choices_of_the_scoring_pass_hold(
    model_folder: MakeFolder, sequences: Sequences
) -> None:
    """R2: steps so large that the routers change their minds."""
    lengths = sequences[1]
    policy = make_policy(model_folder, lr=0.05)
    scores = policy.score(*sequences, 1.0, return_routes=True)
    batch = replace(make_batch(policy, sequences), routes=scores.routes)
    policy.update(batch, ObjectiveConfig(), 1.0)
    changed = policy.score(*sequences, 1.0, return_routes=True).routes
    assert not torch.equal(changed.sort(-1).values, scores.routes.sort(-1).values)
    taken = experts_taken(policy, lambda: policy.update(batch, ObjectiveConfig(), 1.0), lengths)
    known = (scores.routes != NO_ROUTE).all(-1)
    assert torch.equal(taken[known], scores.routes.long().sort(-1).values[known])


@pytest.mark.parametrize(
    ("family", "renormalised"), [("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True)]
)
def test_logits_and_gradients_are_those_of_transformers_with_these_experts(
    model_folder: MakeFolder, sequences: Sequences, family: str, renormalised: bool
) -> None:
    changes = {} if renormalised else {"norm_topk_prob": False}
    folder = model_folder(family, **changes)
    policy = Policy(folder, precision_map("fp32"), config(), seed=0)
    theirs = transformers_model(folder)
    experts = MODELS[family].get("num_experts") or MODELS[family]["num_local_experts"]
    routes = random_routes(sequences, experts)
    for layer, block in enumerate(theirs.model.layers):
        block.mlp.gate.forward = MethodType(
            routed(routes[:, :, layer].flatten(0, 1), renormalised), block.mlp.gate
        )
    tokens = sequences[0]
    expected = theirs(input_ids=tokens).logits
    found = hidden_states(policy, tokens, routes).float() @ policy.model.output_weight.float().T
    assert (found - expected).abs().max() < 1e-4
    assert (logits(policy, tokens) - expected).abs().max() > 0.1

    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    ours = dict(convert.to_hf({name: p.grad for name, p in policy.model.named_parameters()}, policy.rules))
    name = "mlp" if family == "qwen3_moe" else "block_sparse_moe"
    for layer, block in enumerate(theirs.model.layers):
        gradient = ours[f"model.layers.{layer}.{name}.gate.weight"]
        assert gradient.norm() > 1e-3
        assert relative(gradient, block.mlp.gate.weight.grad) < 1e-4


def routed(routes: torch.Tensor, renormalised: bool) -> Callable[..., Any]:
    """A router of transformers that takes `routes` [T, k], and its own where there is none."""

    def forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = F.linear(hidden, self.weight)
        probs = scores.float().softmax(-1)
        ids = torch.where(routes == NO_ROUTE, probs.topk(self.top_k, dim=-1).indices, routes.long())
        weights = probs.gather(1, ids)
        return scores, weights / weights.sum(-1, keepdim=True) if renormalised else weights, ids

    return forward


def test_micro_batches_do_not_matter(model_folder: MakeFolder, sequences: Sequences) -> None:
    whole = make_policy(model_folder)
    batch = replace(make_batch(whole, sequences), routes=random_routes(sequences))
    metrics, expected = gradients(whole, batch)
    _, without = gradients(make_policy(model_folder), replace(batch, routes=None))
    cut = make_policy(model_folder, micro_batch_tokens=12)
    cut_metrics, found = gradients(cut, batch)
    assert cut_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    router = next(name for name in expected if "router" in name)
    assert relative(without[router], expected[router]) > 0.1
    one, *others = (
        make_policy(model_folder, micro_batch_tokens=tokens).score(
            *sequences, 1.0, routes=batch.routes, return_routes=True
        )
        for tokens in (8192, 36, 12)
    )
    for other in others:
        assert torch.equal(other.routes, one.routes)
        torch.testing.assert_close(other.logp, one.logp, rtol=0, atol=1e-5)


def test_a_batch_is_cut_with_its_routes(sequences: Sequences) -> None:
    zeros = torch.zeros(sequences[0].shape)
    batch = TrainBatch(*sequences, zeros, zeros, zeros[:, 0], routes=random_routes(sequences))
    part = batch.select(torch.tensor([4, 1]))
    assert torch.equal(part.routes, batch.routes[[4, 1], :5])
    with pytest.raises(ValueError, match=r"routes must be torch.int16 \(6, 12, 2, 2\)"):
        replace(batch, routes=batch.routes[:, :-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.long(), r"routes must be int16 \[6, 12, 2, 2\], got torch.int64"),
        (lambda r: r[:, :, :1], r"routes must be int16 \[6, 12, 2, 2\], got torch.int16 \[6, 12, 1, 2\]"),
        (lambda r: r.where(r != 7, 8), r"routes must lie in \[0, 8\), or be -1, got -1 to 8"),
        (lambda r: r.where(r != 7, -2), r"routes must lie in \[0, 8\), or be -1, got -2 to 6"),
        (lambda r: planted(r, [5, 5]), r"token 2 of sequence 1 in layer 1: \[5, 5\] names an expert twice"),
        (
            lambda r: planted(r, [5, NO_ROUTE]),
            r"in layer 1: \[5, -1\] names an expert twice, or not all of them",
        ),
        (lambda r: torch.zeros_like(r), r"token 0 of sequence 0 in layer 0: \[0, 0\] names an expert twice"),
    ],
)
def test_what_cannot_be_routes_is_refused(
    sequences: Sequences, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    routes = random_routes(sequences)
    check_routes(routes, EXPERTS, (6, 12, LAYERS, TOP_K))
    with pytest.raises(ValueError, match=message):
        check_routes(change(routes), EXPERTS, (6, 12, LAYERS, TOP_K))


def planted(routes: torch.Tensor, experts: list[int]) -> torch.Tensor:
    routes = routes.clone()
    routes[1, 2, 1] = torch.tensor(experts, dtype=torch.int16)
    return routes

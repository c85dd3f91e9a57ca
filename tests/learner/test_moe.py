from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.moe import top_k_slots
from learner.policy import Policy
from tests.learner.conftest import LAYERS, MakeFolder, Sequences, config, precision_map


@given(st.integers(0, 2**31), st.integers(1, 4), st.booleans())
def test_slots_descend_and_ties_go_to_the_lower_expert(seed: int, top_k: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(10, 6, generator=generator)
    if coarse:
        probs = (probs * 3).round() / 3
    routing_map = torch.zeros(10, 6, dtype=torch.bool)
    routing_map.scatter_(1, torch.rand(10, 6, generator=generator).argsort(1)[:, :top_k], True)
    ids, weights = top_k_slots(probs, routing_map, top_k)
    for row in range(10):
        chosen = [expert for expert in range(6) if routing_map[row, expert]]
        expected = sorted(chosen, key=lambda expert: (-probs[row, expert].item(), expert))
        assert ids[row].tolist() == expected
        assert torch.equal(weights[row], probs[row, expected])


def test_gradients_reach_the_chosen_coefficients_only() -> None:
    probs = torch.tensor([[0.2, 0.5, 0.3]], requires_grad=True)
    _, weights = top_k_slots(probs, torch.tensor([[True, True, False]]), 2)
    (weights * torch.tensor([[10.0, 1.0]])).sum().backward()
    assert probs.grad.tolist() == [[1.0, 10.0, 0.0]]


def test_weights_are_quantised_once_for_each_version(model_folder: MakeFolder, sequences: Sequences) -> None:
    policy = Policy(model_folder("qwen3_moe"), precision_map("minite"), config(), seed=0)
    tokens, lengths, mask = sequences
    experts = policy.model.experts()[0]
    spec = experts.execution_spec
    first = experts.quantized(spec)
    policy.score(tokens, lengths, mask, 1.0)
    assert experts.quantized(spec) is first  # shared by export and scoring
    policy.supervised_step(tokens, lengths, mask)
    second = experts.quantized(spec)
    assert second is not first
    assert not torch.equal(second.w2.codes, first.w2.codes)
    with torch.no_grad():
        experts.weight2.mul_(2.0)
    assert torch.equal(experts.quantized(spec).w2.outer_scales, 2 * second.w2.outer_scales)


def test_report_counts_expert_calls(model_folder: MakeFolder, sequences: Sequences) -> None:
    policy = Policy(model_folder("mixtral"), precision_map("minite"), config(micro_batch_tokens=24), seed=0)
    report = policy.report()
    assert (report.engine, report.backend, report.expert_layers) == ("megatron", "reference", LAYERS)
    assert report.precision_map is policy.precision_map and report.expert_calls == 0
    policy.score(*sequences, 1.0)
    # lengths 12 12 | 9 7 | 5 3 fit into 24 padded tokens
    assert policy.report().expert_calls == 3 * LAYERS

from __future__ import annotations

import torch

from learner.policy import Policy
from tests.learner.conftest import LAYERS, MakeFolder, Sequences, config, precision_map


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
    assert policy.report().expert_calls == 2 * LAYERS

"""Counts of parameters and operations, against transformers' own modules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from learner.families.architecture import Architecture
from learner.families.registry import family_of
from learner.layout import Layout
from learner.upcycle import upcycled_config
from rl.compose import load_config
from rl.flops import forward_flops, update_flops
from rl.preflight.model import planned_architecture
from rl.preflight.parameters import active, count, held_by

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "qwen3_moe",
        {**SMALL, "num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "tied": (
        "qwen3_moe",
        {**SMALL, "num_experts": 8, "moe_intermediate_size": 32, "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", {**SMALL, "num_local_experts": 4, "intermediate_size": 48}),
}


@cache
def on_meta(name: str) -> tuple[Architecture, PreTrainedModel]:
    family, settings = MODELS[name]
    config = AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        return family_of(config).read(config), AutoModelForCausalLM.from_config(config)


def sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Parameters in experts, and all others."""
    named = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in named.items() if ".experts." in name)
    return experts, sum(named.values()) - experts


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_transformers(name: str):
    architecture, model = on_meta(name)
    found = count(architecture)
    assert (found.experts, found.outside) == sizes(model)


def test_qwen3_30b_a3b_is_described_as_it_is():
    """Of the published model: 30.5 B parameters, 3.3 B of them for a token, embedding included."""
    config = load_config(["+recipe=minite"])
    architecture, _ = planned_architecture(config)
    with torch.device("meta"):
        described = AutoConfig.for_model(str(config.model.family), **config.model.hf_config)
        model = AutoModelForCausalLM.from_config(described)
    found = count(architecture)
    assert (found.experts, found.outside) == sizes(model)
    assert found.total == pytest.approx(30.5e9, rel=2e-3)
    assert active(architecture) + found.embedding == pytest.approx(3.3e9, rel=2e-2)


@pytest.mark.slow
def test_the_upcycled_model_is_described_as_it_is():
    described, _ = planned_architecture(load_config(["+recipe=smollm2", "model.experts=6"]))
    config = upcycled_config("smollm2", 6)
    found = family_of(config).read(config)
    assert replace(found, norm_eps=described.norm_eps) == described
    assert found.norm_eps == pytest.approx(described.norm_eps)


@pytest.mark.parametrize("name", MODELS)
def test_what_the_ranks_hold_makes_up_the_model(name: str):
    architecture, _ = on_meta(name)
    found = count(architecture)
    for tensor, pipeline, data, expert in product((1, 2, 4), (1, 2), (1, 2), (1, 2, 4)):
        layout = Layout(tensor, expert, pipeline, data)
        if list(layout.problems(architecture)):
            continue
        stages = [held_by(architecture, layout, stage) for stage in range(pipeline)]
        assert expert * sum(stage.experts for stage in stages) == found.experts
        everywhere = architecture.layers * (found.layer.norms + found.layer.router) + found.final_norm
        split = sum(stage.outside for stage in stages) - everywhere
        copies = found.embedding if architecture.tied_embeddings and pipeline > 1 else 0
        assert tensor * split + everywhere == found.outside + copies


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_that_torch_counts(name: str):
    """FlopCounterMode sees products and attention; it counts attention as if every token saw every other."""
    architecture, _ = on_meta(name)
    family, settings = MODELS[name]
    described = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(
        described, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.randint(0, 128, (1, 24), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens).logits
    forward = counter.get_total_flops()
    unseen = 4 * architecture.layers * architecture.heads * architecture.head_dim * (24 * 23 // 2)
    norms = (
        2 * 24 * (count(architecture).layer.norms * architecture.layers + architecture.hidden)
    )  # no products
    assert forward_flops(architecture, [24]) == forward - unseen + norms
    assert logits.shape == (1, 24, 128)
    assert update_flops(architecture, [24]) == 3 * forward_flops(architecture, [24])
    both = forward_flops(architecture, [24, 5], scored=7)
    output = 2 * architecture.vocab * architecture.hidden
    alone = forward_flops(architecture, [24]) + forward_flops(architecture, [5])
    assert both == alone - (29 - 7) * output

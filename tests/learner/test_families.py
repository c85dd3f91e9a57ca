from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from learner.families.registry import family_of
from tests.learner.conftest import MODELS

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}


def read(family: str, **changes: Any) -> Any:
    settings = {**MODELS[family], **changes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return family_of(config).read(config)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}, "sliding_window=16"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window=True"),
        ("mixtral", {"sliding_window": 16}, "sliding_window=16"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_moe", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("mixtral", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("qwen3_moe", {"rope_parameters": YARN}, "rope_parameters="),
        ("mixtral", {"rope_parameters": YARN}, "rope_parameters="),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits=True"),
        ("mixtral", {"partial_rotary_factor": 0.5}, "rope_parameters="),
        ("qwen3_moe", {"something_new": 3}, "something_new=3 is not understood"),
        ("mixtral", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ],
)
def test_what_would_be_ignored_is_refused(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"{family} model: .*{named}"):
        read(family, **changes)


def test_every_problem_is_named() -> None:
    with pytest.raises(ValueError, match=r"attention_bias.*decoder_sparse_step"):
        read("qwen3_moe", attention_bias=True, decoder_sparse_step=2)


def test_another_model_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'llama' is not supported; there are: qwen3_moe, mixtral"):
        family_of(AutoConfig.for_model("llama"))


def test_qwen3_moe_as_published() -> None:
    """Keys of Qwen/Qwen3-30B-A3B's config.json, among them some that mean nothing for this model."""
    published = AutoConfig.for_model(
        "qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        attention_bias=False,
        head_dim=128,
        hidden_size=2048,
        intermediate_size=6144,
        max_position_embeddings=40960,
        max_window_layers=48,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        rope_scaling=None,
        rope_theta=1000000.0,
        sliding_window=None,
        tie_word_embeddings=False,
        use_sliding_window=False,
        vocab_size=151936,
    )
    architecture = family_of(published).read(published)
    assert (architecture.layers, architecture.experts, architecture.experts_per_token) == (48, 128, 8)
    assert (architecture.head_dim, architecture.expert_ffn, architecture.rope_theta) == (128, 768, 1e6)
    assert architecture.qk_norm and architecture.renormalize_router and not architecture.tied_embeddings


def test_a_mixtral_expert_is_as_wide_as_the_dense_layer() -> None:
    architecture = read("mixtral", intermediate_size=80)
    assert architecture.expert_ffn == 80
    assert architecture.head_dim == 12 and not architecture.qk_norm

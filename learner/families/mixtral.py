"""Mixtral: Llama's attention, experts of the dense width (Jiang et al. 2024, arXiv 2401.04088)."""

from __future__ import annotations

from transformers import PretrainedConfig

from learner.families.architecture import Architecture, Family, refuse_unsupported

_USED = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)
_REQUIRED = {"router_jitter_noise": (0, 0.0)}


def _read(config: PretrainedConfig) -> Architecture:
    refuse_unsupported(config, used=_USED, required=_REQUIRED)
    return Architecture(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        experts=config.num_local_experts,
        experts_per_token=config.num_experts_per_tok,
        expert_ffn=config.intermediate_size,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        rope_theta=config.rope_parameters["rope_theta"],
        norm_eps=config.rms_norm_eps,
        tied_embeddings=config.tie_word_embeddings,
        qk_norm=False,
        renormalize_router=True,
    )


FAMILY = Family(model_type="mixtral", read=_read, block="block_sparse_moe", gate="w1", up="w3", down="w2")

"""Qwen3-MoE: normalised queries and keys, many small experts (Yang et al. 2025, arXiv 2505.09388)."""

from __future__ import annotations

from transformers import PretrainedConfig

from learner.families.architecture import Architecture, Family, refuse_unsupported

_USED = (
    "head_dim",
    "hidden_size",
    "intermediate_size",  # the width of dense layers, of which there must be none
    "max_position_embeddings",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)
_REQUIRED = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "use_sliding_window": (False,),
}
# Written by older configurations; without use_sliding_window it selects nothing.
_INERT = ("max_window_layers",)


def _read(config: PretrainedConfig) -> Architecture:
    refuse_unsupported(config, used=(*_USED, *_INERT), required=_REQUIRED)
    return Architecture(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        expert_ffn=config.moe_intermediate_size,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        rope_theta=config.rope_parameters["rope_theta"],
        norm_eps=config.rms_norm_eps,
        tied_embeddings=config.tie_word_embeddings,
        qk_norm=True,
        renormalize_router=config.norm_topk_prob,
    )


FAMILY = Family(
    model_type="qwen3_moe", read=_read, block="mlp", gate="gate_proj", up="up_proj", down="down_proj"
)

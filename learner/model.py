"""Policy and value function as Megatron-core GPTModels, put together from specs and subclasses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from kernels.precision_map import PrecisionMap
from learner.families.architecture import Architecture
from learner.megatron_api import (
    GPTModel,
    ModuleSpec,
    MoESubmodules,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
)
from learner.modules import CausalAttention, RMSNorm, Rotary, Router
from learner.moe import Experts, SpecifiedMoELayer
from learner.packing import Packing
from learner.replay import RouteReplay, replayed


class Trunk(GPTModel):
    """A GPTModel that stops before the output layer."""

    def __init__(self, architecture: Architecture, precision_map: PrecisionMap, dtype: torch.dtype) -> None:
        layers = [_layer_spec(architecture, precision_map, i) for i in range(architecture.layers)]
        with _without_mlp_warning():
            super().__init__(
                _transformer_config(architecture, dtype),
                TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
                vocab_size=architecture.vocab,
                max_sequence_length=architecture.max_positions,
                position_embedding_type="rope",
                rotary_base=architecture.rope_theta,
                share_embeddings_and_output_weights=architecture.tied_embeddings,
            )
        self.rotary_pos_emb = Rotary(
            kv_channels=architecture.head_dim,
            rotary_percent=1.0,
            rotary_base=architecture.rope_theta,
            use_cpu_initialization=True,
        )

    def hidden_states(
        self, tokens: torch.Tensor, packing: Packing, routes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Packed tokens, int64 [T] -> [T, H] after the final norm.

        routes: integer [T, layers, k], the experts to take (see `learner.replay`).
        """
        rotary = self.rotary_pos_emb(packing.longest).to(tokens.device)[packing.positions]
        embedded = self.embedding(input_ids=tokens[None], position_ids=None)
        with replayed(self.route_replays(), routes):
            # Megatron hands the mask on to the core attention as it is.
            hidden = self.decoder(hidden_states=embedded, attention_mask=packing, rotary_pos_emb=rotary)
        return hidden.squeeze(1)

    def experts(self) -> list[Experts]:
        """The experts of each layer."""
        return [layer.mlp.experts for layer in self.decoder.layers]

    def route_replays(self) -> list[RouteReplay]:
        """What chooses the experts of each layer."""
        return [layer.mlp.router.router_replay for layer in self.decoder.layers]


class PolicyModel(Trunk):
    """A trunk with its output layer, which is the embedding when the two are tied."""

    @property
    def output_weight(self) -> torch.Tensor:
        """[V, H]"""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ValueModel(Trunk):
    """A trunk with a linear head of one output, in FP32, in place of the output layer."""

    def __init__(self, architecture: Architecture, precision_map: PrecisionMap, dtype: torch.dtype) -> None:
        # Megatron allocates no output layer where it is said to be the embedding.
        super().__init__(replace(architecture, tied_embeddings=True), precision_map, dtype)
        self.value_head = nn.Linear(architecture.hidden, 1, dtype=torch.float32)


def _transformer_config(architecture: Architecture, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.expert_ffn,
        moe_ffn_hidden_size=architecture.expert_ffn,
        num_moe_experts=architecture.experts,
        moe_router_topk=architecture.experts_per_token,
        # Softmax over the chosen logits equals softmax over all, renormalised over the chosen.
        moe_router_pre_softmax=not architecture.renormalize_router,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",  # replaced by SpecifiedMoELayer
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are always loaded. (With tensor parallelism this must be True: Megatron marks split
        # weights there.)
        perform_initialization=False,
        use_cpu_initialization=True,
        deterministic_mode=True,
        cuda_graph_scope=[],
        # Fused kernels need Transformer Engine or Apex, or compile for seconds at the first step.
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def _layer_spec(architecture: Architecture, precision_map: PrecisionMap, layer: int) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=architecture.experts, qk_layernorm=architecture.qk_norm, normalization="RMSNorm"
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    own = {"execution_spec": precision_map.spec_for(layer), "layer": layer}
    experts = ModuleSpec(module=Experts, params=own)
    parts.mlp = ModuleSpec(module=SpecifiedMoELayer, submodules=MoESubmodules(experts=experts, router=Router))
    return spec


@contextmanager
def _without_mlp_warning() -> Iterator[None]:
    """Megatron logs a warning for every MLP class that is not its own, and then builds it as asked."""
    logger = logging.getLogger("megatron.core.transformer.transformer_layer")

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Unknown MLP type")

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)

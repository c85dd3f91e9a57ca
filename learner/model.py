"""Policy and value function as Megatron-core GPTModels, put together from specs and subclasses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from kernels.precision_map import PrecisionMap
from kernels.routing import NO_ROUTE
from kernels.strict.output import OutputLayer
from learner.attention import AttentionInput, CausalAttention
from learner.dense import DenseModules
from learner.families.architecture import Architecture
from learner.layout import Layout, Place
from learner.megatron_api import (
    GPTModel,
    ModuleSpec,
    MoESubmodules,
    TransformerBlockSubmodules,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    get_gpt_layer_local_spec,
)
from learner.modules import RecomputedLayer
from learner.moe import Experts, SpecifiedMoELayer
from learner.packing import Packing
from learner.replay import RouteReplay, replayed
from learner.rotary import RotaryAngles
from learner.router import Router
from learner.strict import Part, StrictRouter, make_attention_strict, strict_norm


class Trunk(GPTModel):
    """A GPTModel that stops before the output layer, or the part of it that the process at `place` holds.

    dense: what norms and projections are made of. recompute: whether a gradient computes each layer's activations anew,
    so that only layers' inputs are kept.
    """

    has_output_layer: ClassVar[bool] = False

    def __init__(
        self,
        architecture: Architecture,
        precision_map: PrecisionMap,
        dtype: torch.dtype,
        place: Place,
        dense: DenseModules,
        recompute: bool = False,
    ) -> None:
        self.strict = precision_map.model
        norm = dense.norm if self.strict is None else strict_norm(self.strict)
        layers = [
            _layer_spec(architecture, precision_map, i, dense, recompute) for i in place.layers(architecture)
        ]
        with _without_mlp_warning():
            super().__init__(
                _transformer_config(architecture, dtype, place.layout),
                TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm),
                vocab_size=architecture.vocab,
                max_sequence_length=architecture.max_positions,
                pre_process=place.first_stage,
                post_process=place.last_stage,
                position_embedding_type="rope",
                rotary_base=architecture.rope_theta,
                share_embeddings_and_output_weights=architecture.tied_embeddings,
            )
        self.place = place
        self.own_layers = place.layers(architecture)
        self.rotary_pos_emb = RotaryAngles(
            kv_channels=architecture.head_dim,
            rotary_percent=1.0,
            rotary_base=architecture.rope_theta,
            use_cpu_initialization=True,
        )

    def setup_embeddings_and_output_layer(self) -> None:
        """Megatron's own sends the embedding to the last stage, by way of a GPU; here both are loaded."""

    def hidden_states(
        self, tokens: torch.Tensor, packing: Packing, routes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Packed tokens, int64 [T] -> [T, H] after the final norm; before the last stage, what goes to the next.

        routes: integer [T, layers, k], the experts to take (see `learner.replay`).
        """
        missing = -len(tokens) % self.place.layout.tensor
        rotary = None
        if self.strict is None:
            rotary = self.rotary_pos_emb.at(packing.positions, packing.longest, self.config.params_dtype)
        embedded = self._embedded(F.pad(tokens, (0, missing))) if self.place.first_stage else None
        with replayed(self.route_replays(), self._own_routes(routes, missing)):
            hidden = self.decoder(hidden_states=embedded, attention_mask=AttentionInput(packing, rotary))
        if not self.place.last_stage:
            return hidden
        return self._all_tokens(hidden.squeeze(1))[: len(tokens)]

    def compute_under(self, precision_map: PrecisionMap) -> None:
        """From here on everything computes under another map, with the same weights: for a diagnosis. Raises ValueError
        for a strict map after one that is not, and the other way round.
        """
        if (precision_map.model is None) != (self.strict is None):
            raise ValueError("a model stays strict, or not strict, as it was made")
        for layer, experts in zip(self.own_layers, self.experts(), strict=True):
            if experts.execution_spec != precision_map.spec_for(layer):
                experts.compute_under(precision_map.spec_for(layer))
        self.strict = precision_map.model
        for module in self.modules():
            if isinstance(module, Part) and self.strict is not None:
                module.under(self.strict)

    def experts(self) -> list[Experts]:
        """The experts of each layer that this process holds."""
        return [layer.mlp.experts for layer in self.decoder.layers]

    def route_replays(self) -> list[RouteReplay]:
        """What chooses the experts of each layer that this process holds."""
        return [layer.mlp.router.router_replay for layer in self.decoder.layers]

    def own_tokens(self, tokens: int) -> slice:
        """Which of T packed tokens this process routes: all, or its part of them where tensor parallelism cuts."""
        part = -(-tokens // self.place.layout.tensor)
        return slice(min(self.place.tensor * part, tokens), min((self.place.tensor + 1) * part, tokens))

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, 1, H], or this process's part of the T."""
        if (
            self.config.sequence_parallel
        ):  # Megatron's embedding then enters a generator for GPUs, for dropout
            return self.embedding.word_embeddings(tokens[None])
        return self.embedding(input_ids=tokens[None], position_ids=None)

    def _own_routes(self, routes: torch.Tensor | None, missing: int) -> torch.Tensor | None:
        if routes is None:
            return None
        padded = F.pad(routes, (0, 0, 0, 0, 0, missing), value=NO_ROUTE)
        own = padded.tensor_split(self.place.layout.tensor)[self.place.tensor]
        return own[:, self.own_layers.start : self.own_layers.stop]

    def _all_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] of this process's part of the T. Its gradient is that of all that is computed from it."""
        return gather_from_sequence_parallel_region(hidden) if self.config.sequence_parallel else hidden


class PolicyModel(Trunk):
    """A trunk with its output layer, which is the embedding when the two are tied."""

    has_output_layer = True

    @cached_property
    def strict_output(self) -> OutputLayer | None:
        """How a strict spec computes the output layer; None: as the engine does."""
        return None if self.strict is None else OutputLayer(self.strict)

    def compute_under(self, precision_map: PrecisionMap) -> None:
        super().compute_under(precision_map)
        if self.strict_output is not None and self.strict is not None:
            self.strict_output.model = self.strict

    @property
    def output_weight(self) -> torch.Tensor:
        """[V, H], or this process's rows of it, on the last pipeline stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ValueModel(Trunk):
    """A trunk with a linear head of one output, in FP32, in place of the output layer."""

    def __init__(
        self,
        architecture: Architecture,
        precision_map: PrecisionMap,
        dtype: torch.dtype,
        place: Place,
        dense: DenseModules,
        recompute: bool = False,
    ) -> None:
        # Megatron allocates no output layer where it is said to be the embedding, if that is there.
        tied = replace(architecture, tied_embeddings=True)
        super().__init__(tied, precision_map, dtype, place, dense, recompute)
        self.output_layer = None
        if place.last_stage:
            self.value_head = nn.Linear(architecture.hidden, 1, dtype=torch.float32)

    def _all_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """As a trunk's. Every process computes the same values from all of it, and takes its part of the gradient."""
        if not self.config.sequence_parallel:
            return hidden
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)


def _transformer_config(architecture: Architecture, dtype: torch.dtype, layout: Layout) -> TransformerConfig:
    config = TransformerConfig(
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        calculate_per_token_loss=True,  # losses come divided
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
        perform_initialization=False,  # weights are always loaded
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
    # Stages tell each other how many tokens a micro-batch has. Megatron refuses that beside the dispatcher above.
    config.variable_seq_lengths = layout.pipeline > 1
    return config


def _layer_spec(
    architecture: Architecture, precision_map: PrecisionMap, layer: int, dense: DenseModules, recompute: bool
) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=architecture.experts, qk_layernorm=architecture.qk_norm, normalization="RMSNorm"
    )
    spec.module = RecomputedLayer if recompute else spec.module
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = dense.norm
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = dense.norm
    attention.linear_qkv = dense.column_linear or attention.linear_qkv
    attention.linear_proj = dense.row_linear or attention.linear_proj
    own = {"execution_spec": precision_map.spec_for(layer), "layer": layer}
    experts = ModuleSpec(module=Experts, params=own)
    router = Router
    if precision_map.model is not None:
        make_attention_strict(spec, architecture, precision_map.model)
        router = partial(StrictRouter, model=precision_map.model)
    parts.mlp = ModuleSpec(module=SpecifiedMoELayer, submodules=MoESubmodules(experts=experts, router=router))
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

"""Megatron's parts under a strict spec: the operators of `kernels.strict`, with the usual gradients.

`under` puts each under another model spec than it was made with.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.model_spec import ModelSpec
from kernels.routing import sort_slots
from kernels.strict.attention import attention
from kernels.strict.linear import Weight, linear
from kernels.strict.norm import rms_norm
from kernels.strict.rotary import RotaryTable
from kernels.strict.router import route
from learner.attention import AttentionInput
from learner.families.architecture import Architecture
from learner.megatron_api import (
    ColumnParallelLinear,
    MegatronModule,
    ModuleSpec,
    RowParallelLinear,
    TransformerConfig,
)
from learner.modules import RMSNorm
from learner.router import Router


def strict_norm(model: ModelSpec) -> ModuleSpec:
    return ModuleSpec(module=StrictRMSNorm, params={"model": model})


def make_attention_strict(layer: ModuleSpec, architecture: Architecture, model: ModelSpec) -> None:
    """Replace the parts of Megatron's layer spec outside the MoE layer."""
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = strict_norm(model)
    own = parts.self_attention.submodules
    own.linear_qkv = partial(StrictColumnLinear, model=model)
    own.linear_proj = ModuleSpec(module=StrictRowLinear, params={"model": model})
    own.core_attention = partial(StrictAttention, model=model, rope_theta=architecture.rope_theta)
    if architecture.qk_norm:
        own.q_layernorm = own.k_layernorm = strict_norm(model)


class StrictRMSNorm(RMSNorm):
    def __init__(self, *args: Any, model: ModelSpec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.under(model)

    def under(self, model: ModelSpec) -> None:
        self.rule = model.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.rule)


class StrictColumnLinear(ColumnParallelLinear):
    """A rank's output features; each is a sum of its own, so that they may be shared out."""

    def __init__(self, *args: Any, model: ModelSpec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.form = Weight()
        self.under(model)

    def under(self, model: ModelSpec) -> None:
        self.rule = model.linear

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return linear(input, weight, self.form, self.rule)


class StrictRowLinear(RowParallelLinear):
    """All of the input features: a sum over ranks would be one in another order."""

    def __init__(self, *args: Any, model: ModelSpec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.form = Weight()
        self.under(model)

    def under(self, model: ModelSpec) -> None:
        self.rule = model.linear

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return linear(input, weight, self.form, self.rule)


class StrictAttention(MegatronModule):
    """Core attention, rotary positions included."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        model: ModelSpec,
        rope_theta: float,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        width = config.kv_channels
        self.scale = width**-0.5 if softmax_scale is None else softmax_scale
        self.rotary = RotaryTable(width, rope_theta, model.rotary)
        self.under(model)

    def under(self, model: ModelSpec) -> None:
        self.rule = model.attention
        self.rotary.round_to(model.rotary)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: AttentionInput,
        **_: Any,
    ) -> torch.Tensor:
        """query [T, 1, heads, D], key and value [T, 1, groups, D] -> [T, 1, heads * D]"""
        packing = attention_mask.packing
        query, key = (self.rotary.rotate(x.squeeze(1), packing.positions) for x in (query, key))
        rows, value = [], value.squeeze(1)
        for tokens, own in packing.alike:
            parts = (own.unpack(x[tokens]) for x in (query, key, value))
            mixed = attention(*parts, torch.zeros_like(own.lengths), self.scale, self.rule)
            rows.append(own.pack(mixed))
        return torch.cat(rows).flatten(1).unsqueeze(1)


class StrictRouter(Router):
    """Experts by descending logit, ties to the lower id; none can be given from outside."""

    def __init__(self, *args: Any, model: ModelSpec, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.form = Weight()
        self.under(model)

    def under(self, model: ModelSpec) -> None:
        self.model = model

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[..., H] -> float32 [..., E]."""
        return linear(input, self.weight, self.form, self.model.linear, torch.float32)

    def routing(self, logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Router.routing`."""
        logits = logits.view(-1, self.config.num_moe_experts)
        renormalize = not self.config.moe_router_pre_softmax
        ids, coefficients = route(logits, self.topk, renormalize, self.model.router)
        ids, coefficients = sort_slots(self.router_replay.choose(ids, logits.shape[1]), coefficients)
        return coefficients, ids


Part = StrictRMSNorm | StrictColumnLinear | StrictRowLinear | StrictAttention | StrictRouter

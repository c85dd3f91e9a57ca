"""What an MoE transformer is made of, independent of the family and of the framework that holds it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder with grouped-query attention, rotary positions, RMS norms, and SwiGLU experts in every
    layer. Raises ValueError for numbers that do not fit each other.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_ffn: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    qk_norm: bool  # an RMS norm over each query and key head
    renormalize_router: bool  # router coefficients of the chosen experts sum to one

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"{self.experts_per_token} experts a token must lie in [1, {self.experts}], the experts that there are"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly"
            )


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family as transformers knows it.

    On disk, layer L's experts are `model.layers.L.{block}.experts.E.{gate|up|down}.weight` and its router is
    `model.layers.L.{block}.gate.weight`.
    """

    model_type: str
    read: Callable[[PretrainedConfig], Architecture]
    block: str
    gate: str
    up: str
    down: str


# Configuration keys that say nothing about the function that a model computes.
_NEUTRAL = frozenset(PretrainedConfig().to_dict()) | {
    "_model_name_or_path",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "router_aux_loss_coef",
    "torch_dtype",
    "unk_token_id",
    "use_cache",
}

_REQUIRED: Mapping[str, Collection[Any]] = {
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "hidden_act": ("silu",),
    "output_router_logits": (False,),
    "quantization_config": (None,),
    "sliding_window": (None,),
}


def refuse_unsupported(
    config: PretrainedConfig, used: Collection[str], required: Mapping[str, Collection[Any]]
) -> None:
    """Raises ValueError, naming every key, when `config` asks for something that would otherwise be ignored.

    used: keys that the family reads. required: allowed values of keys that it does not read; those in
    `_REQUIRED` hold for all families. Any other key must be neutral, or absent, or None.
    """
    values = config.to_dict()
    rules = {**_REQUIRED, **required}
    problems = [
        f"{key}={values[key]!r} is not supported (supported: {', '.join(map(repr, allowed))})"
        for key, allowed in rules.items()
        if values.get(key) is not None and values[key] not in allowed
    ]
    known = _NEUTRAL.union(used, rules, ("rope_parameters",))
    problems += [
        f"{key}={value!r} is not understood"
        for key, value in values.items()
        if key not in known and value is not None
    ]
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type") != "default" or set(rope) != {"rope_type", "rope_theta"}:
        problems.append(
            f"rope_parameters={rope} is not supported (supported: rope_type 'default' with rope_theta)"
        )
    if problems:
        raise ValueError(f"{config.model_type} model: " + "; ".join(problems))

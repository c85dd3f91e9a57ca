"""Parameters of a model, by part, and what of them a rank of the learner holds."""

from __future__ import annotations

from dataclasses import dataclass

from learner.families.architecture import Architecture
from learner.layout import Layout


@dataclass(frozen=True)
class LayerParameters:
    """Of one decoder layer: attention (its four projections), router, norms, experts."""

    attention: int
    router: int
    norms: int
    experts: int

    @property
    def outside(self) -> int:
        """All but the experts."""
        return self.attention + self.router + self.norms


@dataclass(frozen=True)
class Parameters:
    """Counts of a whole model. output: 0 where the output layer is the embedding."""

    layers: int
    layer: LayerParameters
    embedding: int
    output: int
    final_norm: int

    @property
    def experts(self) -> int:
        return self.layers * self.layer.experts

    @property
    def outside(self) -> int:
        """All but the experts."""
        return self.embedding + self.output + self.final_norm + self.layers * self.layer.outside

    @property
    def total(self) -> int:
        return self.outside + self.experts


def count(model: Architecture) -> Parameters:
    """Parameters of `model`: grouped-query attention without biases, RMS norms, SwiGLU experts in every layer."""
    hidden, queries, keys = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = LayerParameters(
        attention=hidden * (queries + 2 * keys) + queries * hidden,
        router=model.experts * hidden,
        norms=2 * hidden + (2 * model.head_dim if model.qk_norm else 0),
        experts=model.experts * expert_parameters(model),
    )
    table = model.vocab * hidden
    return Parameters(model.layers, layer, table, 0 if model.tied_embeddings else table, hidden)


def expert_parameters(model: Architecture) -> int:
    """Of one expert: gate, up and down projection."""
    return 3 * model.hidden * model.expert_ffn


def active(model: Architecture) -> int:
    """Parameters that multiply a token: all but the embedding, which is looked up, and the experts not chosen."""
    found = count(model)
    output = found.output or found.embedding
    chosen = model.experts_per_token * expert_parameters(model)
    return output + found.final_norm + model.layers * (found.layer.outside + chosen)


@dataclass(frozen=True)
class Held:
    """What one rank holds: parameters outside the experts, of which `vectors` are never split, and of experts."""

    outside: int
    experts: int

    @property
    def total(self) -> int:
        return self.outside + self.experts


def held_by(model: Architecture, layout: Layout, stage: int) -> Held:
    """Parameters on a rank of pipeline stage `stage`: attention and vocabulary are split over tensor-parallel ranks,
    experts over expert-parallel ones, layers over stages; norms and routers are on every rank of their stage.
    """
    found = count(model)
    layers = layout.layers_of(stage, model.layers)
    outside = layers * (found.layer.attention // layout.tensor + found.layer.router + found.layer.norms)
    first, last = stage == 0, stage == layout.pipeline - 1
    if first or (last and model.tied_embeddings):
        outside += found.embedding // layout.tensor
    if last:
        outside += found.output // layout.tensor + found.final_norm
    return Held(outside, layers * found.layer.experts // layout.expert)

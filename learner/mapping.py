"""Which Hugging Face tensors make up which Megatron parameter, and how: one rule for each Megatron parameter.

Names are those of the checkpoint on disk. Rotary embeddings rotate halves in both frameworks, so queries
and keys are not permuted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from learner.families.architecture import Architecture, Family


@dataclass(frozen=True)
class Rule(ABC):
    """`merge` and `split` are inverses, exactly; both only rearrange."""

    megatron: str
    hf: tuple[str, ...]

    @abstractmethod
    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensors named `hf`, in that order -> the Megatron parameter."""

    @abstractmethod
    def split(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `merge`: views of `parameter` where the layout allows it."""

    def of_experts(self, first: int, count: int) -> Rule:
        """The rule for the block of `count` experts from `first` on. Of a rule for experts."""
        raise TypeError(f"{self.megatron} holds no experts")


class Copy(Rule):
    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0]

    def split(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        return [parameter]


@dataclass(frozen=True)
class Qkv(Rule):
    """q, k, v [heads * D, H] -> for each key-value group its query heads, then its key, then its value."""

    groups: int
    head_dim: int

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        grouped = [tensor.unflatten(0, (self.groups, -1)) for tensor in tensors]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        grouped = parameter.unflatten(0, (self.groups, -1))
        queries = grouped.shape[1] - 2 * self.head_dim
        parts = grouped.split([queries, self.head_dim, self.head_dim], dim=1)
        return [part.flatten(0, 1) for part in parts]


class GateUp(Rule):
    """E gates [F, H], then E ups [F, H] -> [E, 2F, H], gate rows first."""

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        experts = len(tensors) // 2
        return torch.cat((torch.stack(tensors[:experts]), torch.stack(tensors[experts:])), dim=1)

    def split(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        gate, up = parameter.chunk(2, dim=1)
        return [*gate.unbind(), *up.unbind()]

    def of_experts(self, first: int, count: int) -> Rule:
        ups = len(self.hf) // 2 + first
        return replace(self, hf=self.hf[first : first + count] + self.hf[ups : ups + count])


class Stack(Rule):
    """E tensors [H, F] -> [E, H, F]."""

    def merge(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(tensors)

    def split(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        return list(parameter.unbind())

    def of_experts(self, first: int, count: int) -> Rule:
        return replace(self, hf=self.hf[first : first + count])


def rules(family: Family, architecture: Architecture) -> list[Rule]:
    """One rule for each parameter of the Megatron model, in the order of a forward pass."""
    result: list[Rule] = [Copy("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))]
    for layer in range(architecture.layers):
        result += _layer_rules(family, architecture, layer)
    result.append(Copy("decoder.final_layernorm.weight", ("model.norm.weight",)))
    if not architecture.tied_embeddings:
        result.append(Copy("output_layer.weight", ("lm_head.weight",)))
    return result


def parameter_shapes(architecture: Architecture) -> dict[str, torch.Size]:
    """Shape of each parameter of the Megatron model, whole, by the names that `rules` gives them."""
    a = architecture
    shapes = {
        "embedding.word_embeddings.weight": (a.vocab, a.hidden),
        "decoder.final_layernorm.weight": (a.hidden,),
        "output_layer.weight": (a.vocab, a.hidden),
    }
    of_a_layer = {
        "input_layernorm.weight": (a.hidden,),
        "self_attention.linear_qkv.weight": ((a.heads + 2 * a.kv_heads) * a.head_dim, a.hidden),
        "self_attention.q_layernorm.weight": (a.head_dim,),
        "self_attention.k_layernorm.weight": (a.head_dim,),
        "self_attention.linear_proj.weight": (a.hidden, a.heads * a.head_dim),
        "pre_mlp_layernorm.weight": (a.hidden,),
        "mlp.router.weight": (a.experts, a.hidden),
        "mlp.experts.weight1": (a.experts, 2 * a.expert_ffn, a.hidden),
        "mlp.experts.weight2": (a.experts, a.hidden, a.expert_ffn),
    }
    for layer in range(a.layers):
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in of_a_layer.items()}
    return {name: torch.Size(shape) for name, shape in shapes.items()}


def is_expert(megatron_name: str) -> bool:
    """Whether a Megatron parameter holds a layer's experts, which travel quantised."""
    return ".mlp.experts." in megatron_name


def _layer_rules(family: Family, architecture: Architecture, layer: int) -> list[Rule]:
    megatron, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
    block = f"{hf}.{family.block}"

    def experts(projection: str) -> tuple[str, ...]:
        return tuple(f"{block}.experts.{e}.{projection}.weight" for e in range(architecture.experts))

    def copy(ours: str, theirs: str) -> Rule:
        return Copy(f"{megatron}.{ours}.weight", (f"{theirs}.weight",))

    qkv = tuple(f"{hf}.self_attn.{part}_proj.weight" for part in "qkv")
    norms = [copy(f"self_attention.{part}_layernorm", f"{hf}.self_attn.{part}_norm") for part in "qk"]
    return [
        copy("input_layernorm", f"{hf}.input_layernorm"),
        Qkv(
            f"{megatron}.self_attention.linear_qkv.weight", qkv, architecture.kv_heads, architecture.head_dim
        ),
        *(norms if architecture.qk_norm else []),
        copy("self_attention.linear_proj", f"{hf}.self_attn.o_proj"),
        copy("pre_mlp_layernorm", f"{hf}.post_attention_layernorm"),
        copy("mlp.router", f"{block}.gate"),
        GateUp(f"{megatron}.mlp.experts.weight1", experts(family.gate) + experts(family.up)),
        Stack(f"{megatron}.mlp.experts.weight2", experts(family.down)),
    ]

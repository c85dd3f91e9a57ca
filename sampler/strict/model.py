"""Makes a loaded vLLM model strict, part by part, before anything of it has run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from kernels.model_spec import ModelSpec
from kernels.strict.linear import Weight
from sampler.strict.attention import StrictAttention
from sampler.strict.parts import (
    StrictLinearMethod,
    StrictLogits,
    StrictRMSNorm,
    StrictRotary,
    StrictRouter,
)

Part = StrictLinearMethod | StrictRMSNorm | StrictRotary | StrictRouter | StrictLogits | StrictAttention


def make_strict(model: nn.Module, spec: ModelSpec) -> None:
    """Replace every part of `model` outside its experts that computes.

    Raises ValueError for a part that no strict operator stands for.
    """
    for path, parent in list(model.named_modules()):
        for name, part in list(parent.named_children()):
            if (stand_in := _stand_in(part, spec)) is not None:
                setattr(parent, name, stand_in)
        if is_router(path, parent):
            parent.quant_method = StrictLinearMethod(spec, torch.float32)
        elif isinstance(parent, LinearBase):
            parent.quant_method = StrictLinearMethod(spec)
        elif isinstance(parent, Attention):
            parent.impl = StrictAttention(parent.impl, spec)
        router = getattr(parent, "router", None)
        if isinstance(router, BaseRouter):
            parent.router = StrictRouter(router, router.renormalize, spec)


def is_router(path: str, module: nn.Module) -> bool:
    """Whether `module`, at `path` in a model, computes router logits: a plain layer in vLLM 0.26."""
    return isinstance(module, ReplicatedLinear) and path.endswith(".gate")


def _stand_in(part: nn.Module, spec: ModelSpec) -> nn.Module | None:
    if isinstance(part, RMSNorm):
        return StrictRMSNorm(part.weight, part.variance_epsilon, spec)
    if isinstance(part, LogitsProcessor):
        return StrictLogits(part.org_vocab_size, spec)
    if isinstance(part, RotaryEmbedding):
        if type(part) is not RotaryEmbedding or not part.is_neox_style or part.rotary_dim != part.head_size:
            raise ValueError(f"a strict spec has no rotary positions like those of {part!r}")
        return StrictRotary(part.head_size, part.base, spec)
    return None


def strict_parts(model: nn.Module) -> Iterator[Part]:
    """What `make_strict` put into `model`."""
    for module in model.modules():
        for part in (module, *(getattr(module, name, None) for name in ("quant_method", "impl", "router"))):
            if isinstance(part, Part):
                yield part


def strict_weights(model: nn.Module) -> Iterator[Weight]:
    """What was made of the live weights, to be told when they change."""
    for part in strict_parts(model):
        if isinstance(part, StrictLinearMethod):
            yield part.form
        elif isinstance(part, StrictLogits):
            yield part.output.weight

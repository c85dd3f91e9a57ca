"""Weights of a live vLLM model: their names on the wire, and what is derived from them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import extract_layer_index

from kernels.experts import StoredLayout, derived_name, wire_name
from kernels.precision_map import PrecisionMap
from sampler.quantization import expert_methods
from sampler.strict.model import strict_weights


def weight_views(model: nn.Module) -> dict[str, torch.Tensor]:
    """Views of all live weights by the names under which they travel.

    Experts: `kernels.experts.wire_name`. Everything else: the Hugging Face name; an output layer tied to the
    embedding has none.
    """
    views: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, view in _module_views(prefix, module):
            if view.data_ptr() not in seen:
                views[name] = view
                seen.add(view.data_ptr())
    return views


def _module_views(prefix: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(module, RoutedExperts):
        weights = module.quant_method.weights
        for part, tensor in weights.tensors().items():
            yield wire_name(extract_layer_index(prefix), part), tensor
        return
    for name, parameter in module.named_parameters(recurse=False):
        weight = parameter.data
        if isinstance(module, QKVParallelLinear):
            heads = module.num_heads, module.num_kv_heads, module.num_kv_heads
            for part, view in zip("qkv", weight.split([n * module.head_size for n in heads]), strict=True):
                yield f"{prefix.removesuffix('qkv_proj')}{part}_proj.{name}", view
        elif isinstance(module, VocabParallelEmbedding):
            yield f"{prefix}.{name}", weight[: module.org_vocab_size]  # without the rows that pad it
        else:
            yield f"{prefix}.{name}", weight


class LiveWeights:
    """The weights of a model, which a weight sync replaces in place: an `rl.sync.receiver.Holder`.

    version: of what is held; 0 as loaded. closed: why nothing may be generated from it; None: it may. precision_map,
    layout: of its experts; a dense model has no map.
    """

    precision_map: PrecisionMap

    def __init__(self, model: nn.Module, precision_map: PrecisionMap | None) -> None:
        if precision_map is not None:
            self.precision_map = precision_map
        self.version = 0
        self.closed: str | None = None
        self._methods = expert_methods(model)
        held = {method.weights.layout for method in self._methods.values() if method.weights is not None}
        self.layout = StoredLayout.TILES if StoredLayout.TILES in held else StoredLayout.ROWS
        self._views = weight_views(model)
        self._strict = list(strict_weights(model))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors, by their names on the wire."""
        return self._views

    def refresh(self) -> dict[str, torch.Tensor]:
        """Make anew what is derived from the live tensors, and give it by `kernels.experts.derived_name`."""
        derived = {}
        for weight in self._strict:
            weight.changed()
        for layer, method in self._methods.items():
            method.weights_changed()
            for part, tensor in method.prepared().derived().items():
                derived[derived_name(layer, part)] = tensor
        return derived

"""Weights of a live vLLM model: their names on the wire, and what is derived from them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import extract_layer_index

from kernels.experts import OPERANDS, StoredLayout, derived_name, wire_name
from kernels.precision_map import PrecisionMap
from kernels.shard import Shard, Shards
from sampler.quantization import expert_methods
from sampler.strict.model import strict_weights


def weight_views(model: nn.Module) -> dict[str, tuple[torch.Tensor, Shard | None]]:
    """Views of all live weights by the names under which they travel, and which part of the tensor of that name they
    are, where ranks share it out.

    Experts: `kernels.experts.wire_name`. Everything else: the Hugging Face name; an output layer tied to the
    embedding has none.
    """
    views: dict[str, tuple[torch.Tensor, Shard | None]] = {}
    seen: set[tuple[int, int]] = set()
    for prefix, module in model.named_modules():
        for name, view, shard in _module_views(prefix, module):
            place = view.untyped_storage().data_ptr(), view.storage_offset()
            if place not in seen:
                views[name] = view, shard
                seen.add(place)
    return views


def _module_views(prefix: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Shard | None]]:
    if isinstance(module, RoutedExperts):
        method = module.quant_method
        for part, tensor in method.weights.tensors().items():
            own = method.shared.own if method.shared is not None else None
            yield wire_name(extract_layer_index(prefix), part), tensor, own
        return
    for name, parameter in module.named_parameters(recurse=False):
        weight = parameter.data
        if isinstance(module, QKVParallelLinear):
            heads = module.num_heads, module.num_kv_heads, module.num_kv_heads
            for part, view in zip("qkv", weight.split([n * module.head_size for n in heads]), strict=True):
                shard = _even(module, 0, len(view))
                yield f"{prefix.removesuffix('qkv_proj')}{part}_proj.{name}", view, shard
        elif isinstance(module, VocabParallelEmbedding):
            place = module.shard_indices
            first, end = place.org_vocab_start_index, place.org_vocab_end_index
            view = weight[: end - first]  # without the rows that pad it
            cut = end - first < module.org_vocab_size
            yield (
                f"{prefix}.{name}",
                view,
                Shard(0, first, end - first, module.org_vocab_size) if cut else None,
            )
        elif isinstance(module, RowParallelLinear) and name == "weight":
            yield f"{prefix}.{name}", weight, _even(module, 1, weight.shape[1])
        else:
            yield f"{prefix}.{name}", weight, None


def _even(module: QKVParallelLinear | RowParallelLinear, dim: int, length: int) -> Shard | None:
    ranks = module.tp_size
    return None if ranks == 1 else Shard(dim, module.tp_rank * length, length, ranks * length)


class LiveWeights:
    """The weights of a model, which a weight sync replaces in place: an `rl.sync.receiver.Holder`.

    version: of what is held; 0 as loaded. closed: why nothing may be generated from it; None: it may. precision_map,
    layout: of its experts; a dense model has no map. shards: of tensors that ranks share out, this rank's part; also of
    what such experts are made from, and of what is derived from them.
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
        found = weight_views(model)
        self._views = {name: view for name, (view, _) in found.items()}
        self.shards: Shards = {name: own for name, (_, own) in found.items() if own} | self._expert_shards()
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

    def _expert_shards(self) -> dict[str, Shard]:
        shards: dict[str, Shard] = {}
        for layer, method in self._methods.items():
            if method.shared is not None:
                own = method.shared.own
                shards |= {wire_name(layer, part): own for part in OPERANDS}
                for part, tensor in method.prepared().derived().items():
                    each = len(tensor) // own.length  # experts come first, also where a part is flattened
                    shards[derived_name(layer, part)] = own.times(each)
        return shards

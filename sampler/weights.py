"""Weights of a live vLLM model: their names on the wire, and their replacement in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import extract_layer_index

from kernels.digest import tensor_digest
from kernels.experts import wire_name
from kernels.precision_map import PrecisionMap
from sampler.quantization import ExpertMethod


@dataclass(frozen=True)
class TensorSpec:
    """dtype: a torch type's name, such as "float32"."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def expert_methods(model: nn.Module) -> dict[int, ExpertMethod]:
    """Layer number -> what computes its experts."""
    methods: dict[int, ExpertMethod] = {}
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            assert isinstance(module.quant_method, ExpertMethod)
            methods[extract_layer_index(module.layer_name)] = module.quant_method
    return methods


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
    """The weights of a model and their version. An update is all or nothing:

    `begin`, `receive` as often as needed, then `finish`, or `abort` at any time before. Nothing live is
    touched before `finish` has found everything that was announced.
    """

    def __init__(self, model: nn.Module, precision_map: PrecisionMap) -> None:
        self.version = 0
        self._map = precision_map
        self._methods = expert_methods(model)
        self._views = weight_views(model)
        self._staged: dict[str, torch.Tensor] = {}
        self._next_version: int | None = None

    @property
    def updating(self) -> bool:
        return self._next_version is not None

    def begin(self, version: int, map_fingerprint: str, manifest: Mapping[str, TensorSpec]) -> None:
        """Announce an update: its version, the precision map it was made under, and all its tensors.

        Raises RuntimeError while another one is open, ValueError unless everything fits this model.
        """
        if self.updating:
            raise RuntimeError(f"weights version {version}: the update to {self._next_version} is still open")
        if version <= self.version:
            raise ValueError(f"weights version {version} is not newer than {self.version}, which is held")
        if map_fingerprint != self._map.fingerprint:
            raise ValueError(
                f"weights version {version} was made under precision map {map_fingerprint}, this sampler runs"
                f" under {self._map.fingerprint}"
            )
        problems = [f"{name} is missing" for name in self._views if name not in manifest]
        problems += self._mismatches(manifest)
        _raise_any(problems, f"weights version {version} do not fit this model")
        self._next_version = version

    def receive(self, chunk: Mapping[str, torch.Tensor]) -> None:
        """Stage copies of some tensors.

        Raises RuntimeError when no update is open, ValueError (and stages none of them) for a tensor that is
        unknown, came before, or has another type or shape than the live one.
        """
        version = self._require_open()
        problems = [f"{name} came twice" for name in chunk if name in self._staged]
        problems += self._mismatches({name: TensorSpec.of(tensor) for name, tensor in chunk.items()})
        _raise_any(problems, f"weights version {version} refused")
        self._staged |= {name: tensor.detach().clone() for name, tensor in chunk.items()}

    def finish(self) -> dict[str, str]:
        """Replace the weights; returns the digest of every tensor that is now live.

        Raises RuntimeError when no update is open, ValueError (and leaves it open) when tensors are missing.
        """
        version = self._require_open()
        missing = [f"{name} did not come" for name in self._views if name not in self._staged]
        _raise_any(missing, f"weights version {version} incomplete")
        for name, view in self._views.items():
            view.copy_(self._staged[name])
        for method in self._methods.values():
            method.weights_changed()
        self.version = version
        self.abort()
        return {name: tensor_digest(view) for name, view in self._views.items()}

    def abort(self) -> None:
        """Forget what was staged. The live weights stay as they are."""
        self._staged = {}
        self._next_version = None

    def _require_open(self) -> int:
        if self._next_version is None:
            raise RuntimeError("no weight update is open")
        return self._next_version

    def _mismatches(self, offered: Mapping[str, TensorSpec]) -> list[str]:
        problems = []
        for name, spec in offered.items():
            if name not in self._views:
                problems.append(f"{name} is unknown")
            elif spec != (expected := TensorSpec.of(self._views[name])):
                problems.append(f"{name} is {spec}, expected {expected}")
        return problems


def _raise_any(problems: list[str], what: str, shown: int = 10) -> None:
    if problems:
        rest = f"; and {len(problems) - shown} more" if len(problems) > shown else ""
        raise ValueError(f"{what}: {'; '.join(problems[:shown])}{rest}")

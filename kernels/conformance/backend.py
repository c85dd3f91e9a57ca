"""What is put under conformance: back ends that run expert layers, and quantisers of other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch

from kernels.experts import ExpertWeights
from kernels.quantize import QuantizedTensor
from kernels.quantizer_spec import QuantizerSpec
from kernels.spec import ExecutionSpec


@runtime_checkable
class Backend(Protocol):
    """An implementation of expert layers. Tensors that it is given are on `device`."""

    name: str
    device: torch.device

    def claims(self, spec: ExecutionSpec) -> bool:
        """Whether it computes `spec`; what it does not claim is not asked of it."""
        ...

    def quantize_activation(self, x: torch.Tensor, spec: QuantizerSpec) -> QuantizedTensor:
        """bfloat16 or float32 [R, K] -> as `kernels.quantize.quantize_activation`. R may be 0."""
        ...

    def quantize_weight(self, weight: torch.Tensor, spec: QuantizerSpec, *, halves: bool) -> QuantizedTensor:
        """bfloat16 or float32 [E, N, K] -> as `kernels.quantize.quantize_weight`."""
        ...

    def stored_scales(self, quantized: QuantizedTensor, spec: QuantizerSpec) -> torch.Tensor | None:
        """Block scales in the order in which its kernels read them, as `kernels.quantize.stored_scales`."""
        ...

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: ExpertWeights,
        spec: ExecutionSpec,
    ) -> torch.Tensor:
        """The layer's output [T, H]: x [T, H], topk_ids int64 [T, k], topk_weights float32 [T, k]; T may be 0."""
        ...


@runtime_checkable
class PermutingBackend(Backend, Protocol):
    """A back end that permutes and quantises in one pass."""

    def permute_quantize(
        self, x: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, spec: QuantizerSpec
    ) -> QuantizedTensor:
        """[T, K] -> the quantised rows of every slot, grouped by expert as `kernels.routing.Routing` orders them."""
        ...


@dataclass(frozen=True)
class Adapter:
    """The activation quantiser of another library.

    quantize: bfloat16 [R, K], of any strides -> the bytes that the library makes, as a `QuantizedTensor`: block scales
        in the order of the elements, outer scales float32 [R, 1] or [1, 1] (None for what the library has not)
    stored_scales: the same block scales in the library's own memory order; without it that order is not checked
    refuses: the errors by which the library refuses its input
    """

    name: str
    quantize: Callable[[torch.Tensor], QuantizedTensor]
    stored_scales: Callable[[QuantizedTensor], torch.Tensor] | None = None
    refuses: tuple[type[Exception], ...] = (ValueError,)


@dataclass(frozen=True)
class Subject:
    """What is under test, bound to a spec. A part that is None does not exist and is not checked."""

    name: str
    device: torch.device
    quantize_activation: Callable[[torch.Tensor], QuantizedTensor] | None = None
    quantize_weight: Callable[[torch.Tensor, bool], QuantizedTensor] | None = None
    quantize_gradient: Callable[[torch.Tensor], QuantizedTensor] | None = None
    stored_scales: Callable[[QuantizedTensor], torch.Tensor | None] | None = None
    permute_quantize: Callable[[torch.Tensor, torch.Tensor, int], QuantizedTensor] | None = None
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights], torch.Tensor] | None = None
    refuses: tuple[type[Exception], ...] = (ValueError,)

    @classmethod
    def of_backend(cls, backend: Backend, spec: ExecutionSpec) -> Subject:
        activation, weight, gradient = spec.activation, spec.weight, spec.gradient
        parts: dict[str, Any] = {"forward": lambda x, ids, p, w: backend.forward(x, ids, p, w, spec)}
        if activation is not None:
            parts["quantize_activation"] = lambda x: backend.quantize_activation(x, activation)
            parts["stored_scales"] = lambda quantized: backend.stored_scales(quantized, activation)
            if isinstance(backend, PermutingBackend):
                parts["permute_quantize"] = lambda x, ids, experts: backend.permute_quantize(
                    x, ids, experts, activation
                )
        if weight is not None:
            parts["quantize_weight"] = lambda w, halves: backend.quantize_weight(w, weight, halves=halves)
        if gradient is not None:
            parts["quantize_gradient"] = lambda x: backend.quantize_activation(x, gradient)
        return cls(backend.name, backend.device, **parts)

    @classmethod
    def of_adapter(cls, adapter: Adapter) -> Subject:
        return cls(
            adapter.name,
            torch.device("cpu"),
            quantize_activation=adapter.quantize,
            stored_scales=adapter.stored_scales,
            refuses=adapter.refuses,
        )


BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "reference": "kernels.conformance.reference_backend:BACKEND",
        "triton_emulated": "kernels.conformance.triton_backend:BACKEND",
        "grouped_bf16": "kernels.conformance.triton_backend:GROUPED_BF16",
        "triton_per_tensor": "kernels.conformance.triton_backend:PER_TENSOR",
    }
)


def named_backend(name: str) -> Backend:
    """A key of `BACKENDS`, or `module:attribute` of one's own. Raises ValueError when there is no such back end."""
    if name not in BACKENDS and ":" not in name:
        raise ValueError(
            f"no back end is called {name!r}; there are: {', '.join(BACKENDS)}, or module:attribute"
        )
    found = load(BACKENDS.get(name, name))
    if not isinstance(found, Backend):
        raise ValueError(
            f"{name} is not a back end: it must have what kernels.conformance.backend.Backend lists"
        )
    return found


def named_adapter(path: str) -> Adapter:
    """`module:attribute` -> an `Adapter`, or a function that serves as one. Raises ValueError for anything else."""
    found = load(path)
    if isinstance(found, Adapter):
        return found
    if not callable(found):
        raise ValueError(f"{path} must be an Adapter or a function of a tensor, got {type(found).__name__}")
    return Adapter(path, found)


def load(path: str) -> Any:
    """The attribute at `module:attribute`. Raises ValueError naming what does not exist, or why it cannot be had."""
    module, separator, attribute = path.partition(":")
    if not (module and separator and attribute):
        raise ValueError(f"{path!r} must be module:attribute")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module's own code runs, and can raise anything
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())
        raise ValueError(f"cannot import {module!r}: {reason}") from error
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        raise ValueError(f"module {module!r} has no attribute {attribute!r}") from error

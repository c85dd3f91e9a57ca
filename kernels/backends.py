"""Which implementation computes an expert layer: chosen by its execution spec and device, and said once.

    reference          PyTorch, any spec and device; slow; the definition
    triton_emulated    Triton on a Hopper GPU: FP4 operands decoded exactly to 16 bits
    triton_native      Triton on a Blackwell GPU (compute capability 10.0, 10.3): block-scaled FP4 tensor cores

On a CPU, for strict specs, and for specs that the Triton kernels do not compute, that is the reference. A GPU on which
they do not run, or a back end asked for by name that cannot compute the spec, is refused: nothing is replaced unasked.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels import autograd, reference
from kernels.experts import ExpertWeights, StoredLayout
from kernels.routing import sort_slots
from kernels.spec import ExecutionSpec

NAMES = ("reference", "triton_emulated", "triton_native")
_NATIVE, _EMULATED = ((10, 0), (10, 3)), ((9, 0),)


def _sort_slots(
    ids: torch.Tensor, coefficients: torch.Tensor, places: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if places is not None and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a CUDA graph has rows without tokens, which this back end of experts does not leave out"
        )
    return sort_slots(ids, coefficients)


@dataclass(frozen=True)
class ExpertKernels:
    """The functions of one back end. What `prepare` gives goes to `forward` and `expert_layer` of the same one.

    quantize: as `ExpertWeights.quantize`; prepare, forward: as in `kernels.reference`, prepare with a keyword `compact`
    for an engine that has to spare memory rather than time; expert_layer: as in `kernels.autograd`. layout: the order
    of weights that `forward` reads as it is, without a copy in another one. sort_slots: as
    `kernels.triton.slot_order.sort_slots`, or without leaving out rows, which is then refused in a CUDA graph.
    """

    name: str
    quantize: Callable[[torch.Tensor, torch.Tensor, ExecutionSpec], ExpertWeights]
    prepare: Callable[..., Any]
    forward: Callable[..., torch.Tensor]
    expert_layer: Callable[..., torch.Tensor]
    layout: StoredLayout = StoredLayout.ROWS
    sort_slots: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _sort_slots


def _prepare_reference(weights: ExpertWeights, spec: ExecutionSpec, *, compact: bool = False) -> Any:
    """The reference has one form of weights."""
    return reference.prepare(weights, spec)


REFERENCE = ExpertKernels(
    "reference",
    ExpertWeights.quantize,
    _prepare_reference,
    reference.forward,
    autograd.expert_layer,
)


def choose(spec: ExecutionSpec, device: torch.device | str, name: str | None = None) -> ExpertKernels:
    """The back end for layers under `spec` whose tensors are on `device`; `name`: that one and no other.

    Prints what it chose, and why, the first time. Raises ValueError for an unknown name, for one that cannot compute
    the spec there, and for a GPU that the Triton kernels do not run on.
    """
    if name is not None and name not in NAMES:
        raise ValueError(f"no back end is called {name!r}; there are: {', '.join(NAMES)}")
    return _choose(spec, torch.device(device), name)


@functools.cache
def _choose(spec: ExecutionSpec, device: torch.device, name: str | None) -> ExpertKernels:
    if name == "reference":
        return _said(REFERENCE, spec, device, "asked for")
    if device.type != "cuda":
        if name is not None:
            raise ValueError(f"{name} computes on an NVIDIA GPU, not on {device}")
        return _said(REFERENCE, spec, device, "no GPU")
    if spec.strict:
        if name is not None:
            raise ValueError(
                f"{name} sums products in an order of its own, which {spec.name!r} does not allow"
            )
        return _said(REFERENCE, spec, device, "a strict spec")
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"expert layers under {spec.name!r} on {device} need the package triton; ask for `reference`"
        )
    from kernels.triton import layer, slot_order

    try:
        layer.check_spec(spec)
    except ValueError as error:
        if name is not None:
            raise
        return _said(REFERENCE, spec, device, str(error))
    capability = torch.cuda.get_device_capability(device)
    fitting = (
        "triton_native" if capability in _NATIVE else "triton_emulated" if capability in _EMULATED else None
    )
    if fitting is None:
        raise ValueError(
            f"the Triton kernels run on compute capability 9.0, 10.0 and 10.3, not on {capability}; ask for `reference`"
        )
    if name not in (None, fitting) and not (name == "triton_emulated" and capability in _NATIVE):
        raise ValueError(f"{name} does not run on compute capability {capability}")
    chosen = name or fitting
    kernels = ExpertKernels(
        chosen,
        layer.quantize,
        functools.partial(layer.prepare, native=chosen == "triton_native"),
        layer.forward,
        layer.expert_layer,
        StoredLayout.ROWS if chosen == "triton_native" else StoredLayout.TILES,
        slot_order.sort_slots,
    )
    return _said(kernels, spec, device, f"compute capability {capability[0]}.{capability[1]}")


def _said(kernels: ExpertKernels, spec: ExecutionSpec, device: torch.device, why: str) -> ExpertKernels:
    print(f"kernels: expert layers under {spec.name!r} on {device}: {kernels.name} ({why})", flush=True)
    return kernels

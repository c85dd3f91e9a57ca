"""Which implementation computes an expert layer: chosen by its execution spec and device, and said once.

    reference          PyTorch, any spec and device; slow; the definition
    triton_emulated    Triton on a Hopper GPU: FP4 operands decoded exactly to 16 bits
    triton_native      Triton on a Blackwell GPU (compute capability 10.0, 10.3): block-scaled FP4 tensor cores
    grouped_bf16       specs without quantisers: PyTorch's grouped BF16 products between the Triton kernels' other steps
    triton_per_tensor  `te_per_tensor` and `te_exact` on either GPU: one scale a tensor, each step a pass, emulated

On a CPU, for strict specs, and for specs that none of the others computes, that is the reference. A GPU on which they
do not run, or a back end asked for by name that cannot compute the spec, is refused: nothing is replaced unasked.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels import autograd, reference
from kernels.experts import ExpertWeights, StoredLayout
from kernels.packed_rows import PackedRows, can_pack
from kernels.routing import sort_slots
from kernels.slots import collect
from kernels.spec import ExecutionSpec

NAMES = ("reference", "triton_emulated", "triton_native", "grouped_bf16", "triton_per_tensor")
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
    pack_rows: as in `kernels.reference`, for its own `forward`; None where that takes no packed rows. collect: as in
    `kernels.slots`. absent_slots: whether `forward`, with a guard, takes slots whose id no expert has, and makes NaN of
    their tokens without waiting for the device.
    """

    name: str
    quantize: Callable[[torch.Tensor, torch.Tensor, ExecutionSpec], ExpertWeights]
    prepare: Callable[..., Any]
    forward: Callable[..., torch.Tensor]
    expert_layer: Callable[..., torch.Tensor]
    layout: StoredLayout = StoredLayout.ROWS
    sort_slots: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _sort_slots
    pack_rows: Callable[[torch.Tensor, ExecutionSpec], PackedRows] | None = None
    collect: Callable[..., torch.Tensor] = collect
    absent_slots: bool = False

    def packs(self, spec: ExecutionSpec) -> bool:
        """Whether `forward` under `spec` takes rows that `pack_rows` quantised elsewhere, for the same bits."""
        return self.pack_rows is not None and can_pack(spec)


def _prepare_reference(weights: ExpertWeights, spec: ExecutionSpec, *, compact: bool = False) -> Any:
    """The reference has one form of weights."""
    return reference.prepare(weights, spec)


@dataclass(frozen=True)
class Family:
    """Back ends that compute the same specs.

    names: the last one is preferred where a GPU has FP4 tensor cores; module: of `check_spec`, which raises ValueError
    for other specs; kernels: the functions of the back end with that name.
    """

    names: tuple[str, ...]
    module: str
    kernels: Callable[[str], ExpertKernels]

    def problem(self, spec: ExecutionSpec) -> str | None:
        """What keeps it from computing `spec`; None when nothing does."""
        try:
            importlib.import_module(self.module).check_spec(spec)
        except ValueError as error:
            return str(error)
        return None


def _triton(name: str) -> ExpertKernels:
    from kernels.triton import combine, layer, slot_order

    native = name == "triton_native"
    return ExpertKernels(
        name,
        layer.quantize,
        functools.partial(layer.prepare, native=native),
        layer.forward,
        layer.expert_layer,
        StoredLayout.ROWS if native else StoredLayout.TILES,
        slot_order.sort_slots,
        None if native else layer.pack_rows,
        combine.collect,
        absent_slots=True,
    )


def _grouped_bf16(name: str) -> ExpertKernels:
    from kernels.triton import combine, slot_order
    from kernels.triton import plain_layer as own

    return ExpertKernels(
        name,
        ExpertWeights.quantize,
        own.prepare,
        own.forward,
        own.expert_layer,
        sort_slots=slot_order.sort_slots,
        collect=combine.collect,
        absent_slots=True,
    )


def _per_tensor(name: str) -> ExpertKernels:
    from kernels.triton import per_tensor_layer as own
    from kernels.triton import slot_order

    return ExpertKernels(
        name, own.quantize, own.prepare, own.forward, own.expert_layer, sort_slots=slot_order.sort_slots
    )


FAMILIES = (
    Family(("triton_emulated", "triton_native"), "kernels.triton.layer", _triton),
    Family(("grouped_bf16",), "kernels.triton.plain_layer", _grouped_bf16),
    Family(("triton_per_tensor",), "kernels.triton.per_tensor_layer", _per_tensor),
)
REFERENCE = ExpertKernels(
    "reference",
    ExpertWeights.quantize,
    _prepare_reference,
    reference.forward,
    autograd.expert_layer,
    pack_rows=reference.pack_rows,
)


def gpu_backend(spec: ExecutionSpec, *, native: bool) -> str:
    """The name of what computes `spec` on a GPU with (native) or without FP4 tensor cores. Needs no GPU."""
    if not spec.strict:
        for family in FAMILIES:
            if family.problem(spec) is None:
                return family.names[-1] if native else family.names[0]
    return "reference"


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
    problems = {}
    for family in FAMILIES:
        if name not in (None, *family.names):
            continue
        problem = family.problem(spec)
        if problem is None:
            capability = torch.cuda.get_device_capability(device)
            kernels = family.kernels(_fitting(family, capability, name))
            return _said(kernels, spec, device, f"compute capability {capability[0]}.{capability[1]}")
        problems[family.names[0]] = problem
    if name is not None:
        raise ValueError("; ".join(problems.values()))
    return _said(REFERENCE, spec, device, "; ".join(problems.values()))


def _fitting(family: Family, capability: tuple[int, int], name: str | None) -> str:
    """The back end of a family for a GPU. Raises ValueError where there is none, or `name` is not one."""
    if capability not in (*_NATIVE, *_EMULATED):
        raise ValueError(
            f"the Triton kernels run on compute capability 9.0, 10.0 and 10.3, not on {capability}; ask for `reference`"
        )
    able = [own for own in family.names if not (own == "triton_native" and capability not in _NATIVE)]
    if name not in (None, *able):
        raise ValueError(f"{name} does not run on compute capability {capability}")
    return name or able[-1]


def _said(kernels: ExpertKernels, spec: ExecutionSpec, device: torch.device, why: str) -> ExpertKernels:
    print(f"kernels: expert layers under {spec.name!r} on {device}: {kernels.name} ({why})", flush=True)
    return kernels

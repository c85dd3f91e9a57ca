"""Which specs these kernels compute. Others are refused, by the name of the field in which they differ."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import fields, replace

import torch

from kernels.catalogue import named_spec
from kernels.quantizer_spec import QuantizerSpec, ScaleDomain
from kernels.spec import ExecutionSpec

Described = QuantizerSpec | ExecutionSpec
_NO_BACKEND_FIELDS = ("name", "activation", "weight", "gradient", "epilogue", "backward", "weight_sync")


# The answers are kept, since layers ask at every call.
@functools.cache
def quantizer_problem(spec: QuantizerSpec, domains: tuple[ScaleDomain, ...]) -> str | None:
    """What keeps the kernels from computing `spec` over one of `domains`; None when nothing does."""
    if spec.outer_domain not in domains:
        return f"outer_domain={spec.outer_domain} is not one of: {', '.join(domains)}"
    activation = named_spec("minite").activation
    assert activation is not None
    return difference(spec, replace(activation, outer_domain=spec.outer_domain))


def check_quantizer(spec: QuantizerSpec, domains: tuple[ScaleDomain, ...]) -> None:
    """Raises ValueError for a quantiser that the kernels do not compute."""
    problem = quantizer_problem(spec, domains)
    if problem is not None:
        raise ValueError(f"the Triton quantiser does not compute this spec: {problem}")


@functools.cache
def layer_problem(spec: ExecutionSpec) -> str | None:
    """What keeps the SwiGLU and the combination from computing `spec`, its quantisers left aside."""
    return difference(spec, named_spec("minite"), _NO_BACKEND_FIELDS)


def check_layer(spec: ExecutionSpec) -> None:
    """Raises ValueError for a layer whose SwiGLU or combination the kernels do not compute."""
    problem = layer_problem(spec)
    if problem is not None:
        raise ValueError(f"the Triton layer does not compute {spec.name!r}: {problem}")


def check_rows(x: torch.Tensor, what: str, multiple: int = 16) -> None:
    """Raises ValueError unless x is bfloat16 or float32 [R, K] with K a positive multiple of `multiple`."""
    wrong = x.dim() != 2 or x.shape[1] == 0 or x.shape[1] % multiple
    if wrong or x.dtype not in (torch.bfloat16, torch.float32):
        found = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(
            f"{what} must be bfloat16 or float32 [R, K], K a multiple of {multiple}, got {found}"
        )


def is_plain(x: torch.Tensor) -> bool:
    """Whether kernels can read `x` where it is: contiguous, and aligned to 16 bytes."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def plain(x: torch.Tensor) -> torch.Tensor:
    """x itself where `is_plain`, else a copy that is."""
    return x if is_plain(x) else x.clone(memory_format=torch.contiguous_format)


def words(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 or float32 [..., K] -> the same memory as int32, or that of a copy: see `plain`."""
    return plain(x.detach()).view(torch.int32)


@functools.cache
def processors(device: torch.device) -> int:
    """Of a GPU; in the interpreter a number that shares work out."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def check_bad_counts(bad_counts: torch.Tensor | None, num_experts: int, device: torch.device) -> None:
    """Raises ValueError for counts that kernels cannot add to."""
    if bad_counts is None:
        return
    if tuple(bad_counts.shape) != (num_experts,) or bad_counts.dtype is not torch.int64:
        found = f"{bad_counts.dtype} {tuple(bad_counts.shape)}"
        raise ValueError(f"bad_counts must be int64 [{num_experts}], got {found}")
    if bad_counts.device != device or not bad_counts.is_contiguous():
        raise ValueError(f"bad_counts must be contiguous and on {device}, got one on {bad_counts.device}")


def difference(found: Described, computed: Described, left_out: Collection[str] = ()) -> str | None:
    """The first field in which they differ, those left out aside; None when there is none."""
    for entry in fields(found):
        own, wanted = getattr(found, entry.name), getattr(computed, entry.name)
        if entry.name not in left_out and own != wanted:
            if isinstance(own, QuantizerSpec) and isinstance(wanted, QuantizerSpec):
                return f"{entry.name}.{difference(own, wanted)}"
            shown = ["quantised" if isinstance(value, QuantizerSpec) else value for value in (own, wanted)]
            return f"{entry.name}={shown[0]}, computed is {shown[1]}"
    return None

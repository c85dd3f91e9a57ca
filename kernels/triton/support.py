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
    return _difference(spec, replace(activation, outer_domain=spec.outer_domain))


def check_quantizer(spec: QuantizerSpec, domains: tuple[ScaleDomain, ...]) -> None:
    """Raises ValueError for a quantiser that the kernels do not compute."""
    problem = quantizer_problem(spec, domains)
    if problem is not None:
        raise ValueError(f"the Triton quantiser does not compute this spec: {problem}")


@functools.cache
def layer_problem(spec: ExecutionSpec) -> str | None:
    """What keeps the SwiGLU and the combination from computing `spec`, its quantisers left aside."""
    return _difference(spec, named_spec("minite"), _NO_BACKEND_FIELDS)


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


def words(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 or float32 [..., K] -> the same memory as int32, contiguous and aligned to 16 bytes."""
    x = x.detach().contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    return x.view(torch.int32)


def _difference(found: Described, computed: Described, left_out: Collection[str] = ()) -> str | None:
    for entry in fields(found):
        own, wanted = getattr(found, entry.name), getattr(computed, entry.name)
        if entry.name not in left_out and own != wanted:
            return f"{entry.name}={own}, computed is {wanted}"
    return None

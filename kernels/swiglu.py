"""What stands between FC1 and FC2: silu(gate) * up, and the router coefficient where a spec puts it here."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F

from kernels.experts import TORCH_TYPE
from kernels.spec import ExecutionSpec, RouterPosition, Swiglu


def swiglu(fc1: torch.Tensor, spec: ExecutionSpec) -> torch.Tensor:
    """[R, 2F], gate then up -> float32 silu(gate) * up, [R, F]."""
    gate, up = fc1.chunk(2, dim=-1)
    if spec.swiglu is Swiglu.FP32_LIBRARY_SILU:
        return F.silu(gate.float()) * up.float()
    if gate.dtype is torch.bfloat16:
        codes = gate.contiguous().view(torch.int16).int() & 0xFFFF
        silu = _silu_of_bf16(gate.device).index_select(0, codes.flatten())
        return silu.view(gate.shape) * up.float()
    # An FP32 exponential differs between vector and scalar code, hence between positions in a batch.
    return F.silu(gate.double()).float() * up.float()


@cache
def _silu_of_bf16(device: torch.device) -> torch.Tensor:
    """float32 [65536], silu of each BF16 number by its 16 bits, one at a time: no position can matter."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double().tolist()
    return torch.tensor([_silu(value) for value in values], dtype=torch.float64).float().to(device)


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x)) if x > -700 else x * math.exp(max(x, -745.2)) if x > -math.inf else math.nan


def swiglu_backward(fc1: torch.Tensor, d_act: torch.Tensor) -> torch.Tensor:
    """float32 [R, 2F], [R, F] -> gradient [R, 2F] of silu(gate) * up."""
    gate, up = fc1.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    d_gate = d_act * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((d_gate, d_act * gate * sigmoid), dim=-1)


def fc2_input(fc1: torch.Tensor, coefficients: torch.Tensor | None, spec: ExecutionSpec) -> torch.Tensor:
    """[R, 2F] -> the input of FC2 before it is quantised, [R, F]: in `spec.swiglu_output`, or in `spec.router_product`
    where the router coefficient multiplies the cast SwiGLU output.

    coefficients: float32 [R], cast already, where the spec's router position is ahead of FC2.
    """
    act, stored = swiglu(fc1, spec), TORCH_TYPE[spec.swiglu_output]
    if spec.router_position is RouterPosition.FC2_OUTPUT:
        return act.to(stored)
    assert coefficients is not None
    if spec.router_position is RouterPosition.SWIGLU_OUTPUT:
        return router_product(act.to(stored), coefficients[:, None], spec)
    return router_product(act, coefficients[:, None], spec).to(stored)


def router_product(values: torch.Tensor, coefficients: torch.Tensor, spec: ExecutionSpec) -> torch.Tensor:
    """float32 coefficients (cast already) times values: one FP32 product, rounded to `spec.router_product`."""
    return (coefficients * values.float()).to(TORCH_TYPE[spec.router_product])


def cast_coefficients(topk_weights: torch.Tensor, spec: ExecutionSpec) -> torch.Tensor:
    """float32 of any shape -> the values of `spec.router_coefficient`, as float32."""
    return topk_weights.to(TORCH_TYPE[spec.router_coefficient]).float()

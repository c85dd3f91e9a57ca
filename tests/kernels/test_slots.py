"""The layer put together from its slots against the layer in one piece: the same bits, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.autograd import expert_layer
from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights
from kernels.quantizer_spec import ScaleDomain
from kernels.reference import prepare
from kernels.slots import gather, slot_coefficients, slot_spec, spread
from kernels.spec import Accumulation, Combine, ExecutionSpec, FloatType

T, HIDDEN, FFN, EXPERTS, TOP_K = 13, 64, 32, 5, 3


def tensor_scaled(spec: ExecutionSpec) -> bool:
    quantizers = (spec.activation, spec.gradient)
    return any(q is not None and q.outer_domain is ScaleDomain.TENSOR for q in quantizers)


def stochastic(spec: ExecutionSpec) -> bool:
    return spec.gradient is not None and spec.gradient.rounding == "stochastic"


NAMES = [
    name for name in CATALOGUE if not tensor_scaled(named_spec(name)) and not stochastic(named_spec(name))
]
SPECS = {name: named_spec(name) for name in NAMES} | {
    "expert order": replace(named_spec("minite"), combine=Combine.EXPERT_ORDER),
    "fma": replace(named_spec("minite"), combine=Combine.SLOT_ORDER_FMA),
    "narrow sums": replace(named_spec("minite"), router_product=FloatType.BF16, combine_sum=FloatType.BF16),
    "wide rows": replace(named_spec("minite"), fc2_output=FloatType.FP32, output=FloatType.FP32),
}


def layer(spec: ExecutionSpec, dtype: torch.dtype, by_slot: bool) -> dict[str, torch.Tensor]:
    """Output and gradients. Products take a row at a time: a library's would depend on how many rows there are."""
    spec = replace(spec, accumulation=Accumulation.TREE) if spec.weight is not None else spec
    g = torch.Generator().manual_seed(0)
    x = torch.randn(T, HIDDEN, generator=g).to(dtype).requires_grad_()
    ids = torch.rand(T, EXPERTS, generator=g).argsort(1)[:, :TOP_K]
    p = torch.rand(T, TOP_K, generator=g).softmax(1).requires_grad_()
    w13 = (torch.randn(EXPERTS, 2 * FFN, HIDDEN, generator=g) / 8).to(dtype).requires_grad_()
    w2 = (torch.randn(EXPERTS, HIDDEN, FFN, generator=g) / 6).to(dtype).requires_grad_()
    d_output = torch.randn(T, HIDDEN, generator=g).to(dtype)
    weights = ExpertWeights.quantize(w13, w2, spec)
    if by_slot:
        own = slot_spec(spec)
        rows, coefficients = spread(x, TOP_K, spec), slot_coefficients(p, spec)
        rows = expert_layer(rows, ids.reshape(-1, 1), coefficients, w13, w2, prepare(weights, own), own)
        output = gather(rows, ids, p, spec).to(dtype)
    else:
        output = expert_layer(x, ids, p, w13, w2, prepare(weights, spec), spec)
    output.backward(d_output)
    return {"output": output.detach(), "x": x.grad, "p": p.grad, "w13": w13.grad, "w2": w2.grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_slots_add_up_to_the_layer(name: str, dtype: torch.dtype) -> None:
    whole, parts = (layer(SPECS[name], dtype, by_slot) for by_slot in (False, True))
    for part, value in whole.items():
        assert value.dtype == parts[part].dtype
        assert torch.equal(value, parts[part]), part


def test_the_combinations_differ() -> None:
    """Else the test above would not tell them apart."""
    outputs = [
        layer(SPECS[name], torch.float32, True)["output"] for name in ("minite", "narrow sums", "wide rows")
    ]
    assert not any(torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])

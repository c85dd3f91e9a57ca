"""How far a backward is from its gradients in FP64.

    python -m kernels.gradient_error [--seed N]

prints, for a BF16 and an MXFP8 backward of the same forward, the relative L2 error of each gradient.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.autograd import expert_layer
from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights
from kernels.layer_input import LayerInput, LayerShape, synthetic_layer
from kernels.reference import expert_rows, prepare
from kernels.routing import Routing
from kernels.spec import ExecutionSpec, RouterPosition

SPECS = ("minite", "minite_mxfp8_backward")


class Gradients(NamedTuple):
    x: torch.Tensor  # [T, H]
    w13: torch.Tensor  # [E, 2F, H]
    w2: torch.Tensor  # [E, H, F]


def gradient_errors(
    layer: LayerInput, d_output: torch.Tensor, spec: ExecutionSpec, seed: int = 0
) -> dict[str, float]:
    """Relative L2 errors against `exact_gradients` under the names dX, dW13 and dW2.

    d_output: [T, H], the gradient of the layer's output. Weights are taken as FP32 masters, whose gradients are not
    rounded again. seed: of stochastic rounding. Raises ValueError as
    `exact_gradients` does.
    """
    exact = exact_gradients(layer, d_output, spec)
    leaves = Gradients(
        layer.x.detach().clone().requires_grad_(),
        *(w.float().requires_grad_() for w in (layer.w13, layer.w2)),
    )
    prepared = prepare(ExpertWeights.quantize(layer.w13, layer.w2, spec), spec)
    output = expert_layer(
        leaves.x, layer.topk_ids, layer.topk_weights, leaves.w13, leaves.w2, prepared, spec, seed=seed
    )
    found = torch.autograd.grad(output, leaves, d_output.to(output.dtype))
    names = ("dX", "dW13", "dW2")
    return {
        name: float((a.double() - b).norm() / b.norm())
        for name, a, b in zip(names, found, exact, strict=True)
    }


def exact_gradients(layer: LayerInput, d_output: torch.Tensor, spec: ExecutionSpec) -> Gradients:
    """The straight-through gradients in FP64, at the forward's own FC1 and SwiGLU values under `spec`.

    Operands are `spec.operand` values from before quantisation; nothing is rounded on the way back. Raises
    ValueError for a spec that multiplies the router coefficient ahead of FC2.
    """
    if spec.router_position is not RouterPosition.FC2_OUTPUT:
        raise ValueError(f"{spec.name!r}: router_position={spec.router_position} is not covered")
    operand = torch.bfloat16 if spec.operand == "bf16" else torch.float32
    x, w13, w2 = (tensor.to(operand) for tensor in (layer.x, layer.w13, layer.w2))
    routing = Routing.group(layer.topk_ids, len(w13))
    prepared = prepare(ExpertWeights.quantize(layer.w13, layer.w2, spec), spec)
    rows = expert_rows(x, routing, prepared)
    gate, up = rows.fc1.double().chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    d_rows = layer.topk_weights.double().flatten()[routing.order, None] * d_output.double()[routing.tokens]
    result = Gradients(*(torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (x, w13, w2)))
    for expert, own in routing.occupied():
        d_act = d_rows[own] @ w2[expert].double()
        d_gate = d_act * up[own] * sigmoid[own] * (1 + gate[own] * (1 - sigmoid[own]))
        d_fc1 = torch.cat((d_gate, d_act * gate[own] * sigmoid[own]), dim=1)
        result.w2[expert] = d_rows[own].T @ rows.swiglu[own].double()
        result.w13[expert] = d_fc1.T @ x[routing.tokens[own]].double()
        result.x.index_add_(0, routing.tokens[own], d_fc1 @ w13[expert].double())
    return result


def random_layer(seed: int) -> tuple[LayerInput, torch.Tensor]:
    """A layer and the gradient of its output, all Gaussian."""
    layer = synthetic_layer(LayerShape(tokens=512, hidden=256, ffn=256, experts=4, top_k=2), "gaussian", seed)
    generator = torch.Generator().manual_seed(seed + 1)
    return layer, torch.randn(layer.x.shape, generator=generator).bfloat16()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.gradient_error", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args(arguments).seed
    layer, d_output = random_layer(seed)
    errors = {name: gradient_errors(layer, d_output, named_spec(name), seed) for name in SPECS}
    print(f"relative L2 error against FP64, {layer.label}")
    print("".join(["gradient  ", *(name.ljust(24) for name in SPECS)]).rstrip())
    for key in errors[SPECS[0]]:
        print("".join([key.ljust(10), *(f"{errors[name][key]:.4f}".ljust(24) for name in SPECS)]).rstrip())


if __name__ == "__main__":
    main()

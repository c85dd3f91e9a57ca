"""How far each product of the gradient is from the same product of the same operands in FP64.

    python -m kernels.triton.gradient_products [--tokens N] [--hidden N] [--ffn N] [--experts N] [--top-k N]

on a GPU, or in Triton's interpreter at small sizes. An operand that is itself a result (d_fc1, say) was rounded to
BF16 before: what such roundings add up to, through the whole layer, is `kernels.gradient_error`'s subject.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from kernels.catalogue import named_spec
from kernels.layer_input import LayerInput, LayerShape, synthetic_layer
from kernels.triton import layer, ops
from kernels.triton.backward import Saved, input_gradient, spread, swiglu_backward, weight_gradient
from kernels.triton.grouping import ExpertGroups


def product_errors(given: LayerInput, d_output: torch.Tensor, master: torch.dtype) -> dict[str, float]:
    """Relative L2 errors of `FC1 dgrad`, `FC1 wgrad`, `FC2 dgrad` and `FC2 wgrad` under `minite`.

    given, d_output [T, H]: on the device that computes. master: the type of the master weights, in which weight
    gradients come; gradients of inputs come in BF16.
    """
    spec = named_spec("minite")
    w13, w2 = given.w13.to(master), given.w2.to(master)
    prepared = layer.prepare(layer.quantize(w13, w2, spec), spec)
    found = ops.run_experts_for_gradient(
        given.x.bfloat16(),
        given.topk_ids,
        given.topk_weights,
        prepared.w13,
        prepared.w2,
        ops.no_bad_rows(prepared.w13),
    )
    saved, groups = Saved(*found[1:5]), ops.groups_of(found[5:])
    d_rows, x_rows, _ = spread(d_output, given.topk_weights, saved, groups)
    d_act = input_gradient(d_rows, w2, groups)
    d_fc1 = swiglu_backward(saved.fc1, d_act, groups)
    return {
        "FC1 dgrad": _dgrad_error(input_gradient(d_fc1, w13, groups), d_fc1, w13, groups),
        "FC1 wgrad": _wgrad_error(weight_gradient(d_fc1, x_rows, groups, master), d_fc1, x_rows, groups),
        "FC2 dgrad": _dgrad_error(d_act, d_rows, w2, groups),
        "FC2 wgrad": _wgrad_error(
            weight_gradient(d_rows, saved.act, groups, master), d_rows, saved.act, groups
        ),
    }


def _dgrad_error(found: torch.Tensor, d_y: torch.Tensor, weight: torch.Tensor, groups: ExpertGroups) -> float:
    pairs = [
        (found[own].double(), d_y[own].double() @ weight[expert].bfloat16().double())
        for expert, own in _rows(groups)
    ]
    return _relative(pairs)


def _wgrad_error(found: torch.Tensor, d_y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> float:
    pairs = [(found[expert].double(), d_y[own].double().T @ x[own].double()) for expert, own in _rows(groups)]
    return _relative(pairs)


def _rows(groups: ExpertGroups) -> list[tuple[int, slice]]:
    """Experts that have rows, and where these stand, without padding."""
    starts, counts = groups.starts.tolist(), groups.counts.tolist()
    return [(e, slice(starts[e], starts[e] + count)) for e, count in enumerate(counts) if count]


def _relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    difference = sum(float((found - exact).square().sum()) for found, exact in pairs)
    return (difference / sum(float(exact.square().sum()) for _, exact in pairs)) ** 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.triton.gradient_products", description=__doc__.split("\n")[0]
    )
    for name, value in (("tokens", 8192), ("hidden", 2048), ("ffn", 768), ("experts", 128), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    shape = LayerShape(**vars(parser.parse_args(arguments)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = synthetic_layer(shape, "gaussian", 0)
    given = LayerInput(
        on_cpu.x.to(device),
        on_cpu.topk_ids.to(device),
        on_cpu.topk_weights.to(device),
        on_cpu.w13.to(device),
        on_cpu.w2.to(device),
        on_cpu.label,
    )
    d_output = torch.randn(on_cpu.x.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    errors = {
        name: product_errors(given, d_output, dtype)
        for name, dtype in (("FP32 masters", torch.float32), ("BF16 masters", torch.bfloat16))
    }
    print(f"relative L2 error against FP64 of each product at its own operands, {shape}, {device}")
    print("product    " + "".join(name.ljust(16) for name in errors).rstrip())
    for product in errors["FP32 masters"]:
        print(
            product.ljust(11) + "".join(f"{own[product]:.2e}".ljust(16) for own in errors.values()).rstrip()
        )


if __name__ == "__main__":
    main()

"""How much single fields weigh: a list of changes, each measured on a linear layer or on the whole expert layer.

`expected` gives sizes that an emulation written independently of this package found on layers of its own. Input
differs, so order and rough size should agree, not digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from kernels.experts import TORCH_TYPE, ExpertWeights
from kernels.guard import Operand as Side
from kernels.labels import spec_from_label
from kernels.layer_input import LayerInput, LayerShape
from kernels.reference import grouped_linear, grouped_operand, prepare
from kernels.routing import Routing
from kernels.spec import ExecutionSpec
from kernels.spec_diff.sensitivity import (
    LayerRun,
    Operand,
    OperandMove,
    OutputMove,
    activation_operand,
    compare_operands,
    compare_outputs,
    measure,
    run_layer,
    weight_operand,
)
from kernels.spec_diff.tables import markdown, percent

SHAPE = LayerShape(tokens=256, hidden=512, ffn=256, experts=16, top_k=8)


class FieldSize(NamedTuple):
    """A change from one spec's label to another's.

    operand: the one whose scale bytes and codes are reported; empty for none
    linear: FC1 alone, every token with every expert; else the whole layer
    """

    title: str
    left: str
    right: str
    expected: str
    operand: str = ""
    linear: bool = True


@dataclass(frozen=True, eq=False)
class MeasuredSize:
    field: FieldSize
    output: OutputMove
    operand: OperandMove | None


_ORDER = "0.3-1.1 %"
_ASSOCIATION = "~1e-5 of outputs"
_TENSOR = "activation.outer_domain=tensor"
_RECAST = "router_position=swiglu_output,router_product=bf16"

FIELD_SIZES: Sequence[FieldSize] = (
    FieldSize(
        "weight blocks 1x16 -> 16x16", "minite_expert", "minite_expert[weight.block=16x16]", "14 %", "w13"
    ),
    FieldSize(
        "activations: largest code 6 -> 4over6 (MSE, 256)",
        "minite",
        "minite[activation.selector=4over6_mse,activation.block_scale_max=256]",
        "8.7-10 %",
        "x",
    ),
    FieldSize("weight outer scale: row -> expert", "minite", "minite_expert", "8.6-8.7 %", "w13"),
    FieldSize("activation outer scale: token -> tensor", "minite", f"minite[{_TENSOR}]", "7-9 %", "x"),
    FieldSize(
        "router coefficient after -> before FC2, per tensor",
        f"minite[{_TENSOR}]",
        f"minite[{_TENSOR},{_RECAST}]",
        "7.3 %",
        "fc2_input",
        linear=False,
    ),
    FieldSize(
        "the same, per token, product in BF16",
        "minite",
        f"minite[{_RECAST}]",
        "3.2 %",
        "fc2_input",
        linear=False,
    ),
    FieldSize(
        "the same, per token, product in FP32",
        "minite",
        "minite[router_position=swiglu_output]",
        "0.9 %",
        "fc2_input",
        linear=False,
    ),
    FieldSize(
        "FC2 input quantised from BF16 -> FP32",
        "minite",
        "minite[swiglu_output=fp32]",
        "2.4 %",
        "fc2_input",
        linear=False,
    ),
    FieldSize(
        "TE fast math: BF16 coefficient of elements",
        "te_per_token",
        "te_per_token[activation.quotient=x*bf16(S/s)]",
        "1.7-2 %",
        "x",
    ),
    *(
        FieldSize(
            f"block scale a/(E*g) -> {value}",
            "minite",
            f"minite[activation.block_scale={value}]",
            _ORDER,
            "x",
        )
        for value in ("(a/E)/g", "(a/E)*S", "a*(S*(1/E))", "(a*(1/E))*S", "(a*rcp~(E))*S")
    ),
    *(
        FieldSize(
            f"quotient x/(s*g) -> {value}", "minite", f"minite[activation.quotient={value}]", _ORDER, "x"
        )
        for value in ("x/(s/S)", "x*(1/(s*(1/S)))", "x*rcp~(s*rcp~(S))", "x*(S/s)", "x*((1/g)/s)")
    ),
    *(
        FieldSize(
            f"outer scale g=A/M,S=1/g -> {value}",
            "minite",
            f"minite[activation.outer_scale={value}]",
            _ORDER,
            "x",
        )
        for value in ("g=A*(1/M),S=rcp~(g)", "S=M/A,g=1/S")
    ),
    FieldSize(
        "torchao's floor of block scales 2^-6, per tensor",
        f"minite[{_TENSOR}]",
        f"minite[{_TENSOR},activation.block_scale_floor=2^-6]",
        "5 % of scales, 3.2 % of codes",
        "x",
    ),
    FieldSize(
        "combine: FP32 FMA -> BF16 sums",
        "minite[combine=slot_order_fma]",
        "minite[combine=any_order,combine_sum=bf16]",
        "0.46 % (60 % of outputs)",
        linear=False,
    ),
    FieldSize(
        "combine: FP32 FMA -> BF16 terms and sums (atomics)",
        "minite[combine=slot_order_fma]",
        "minite[combine=any_order,combine_sum=bf16,router_product=bf16]",
        "0.46 % (60 % of outputs)",
        linear=False,
    ),
    FieldSize(
        "router coefficient FP32 -> BF16",
        "minite",
        "minite[router_coefficient=bf16]",
        "0.33 % (47 % of outputs)",
        linear=False,
    ),
    FieldSize(
        "router coefficient and product FP32 -> BF16",
        "minite",
        "minite[router_coefficient=bf16,router_product=bf16]",
        "0.33 % (47 % of outputs)",
        linear=False,
    ),
    FieldSize(
        "bf16(y)*p -> bf16(y*p)",
        "minite",
        "minite[fc2_output=fp32,router_product=bf16]",
        "0.28 %",
        linear=False,
    ),
    FieldSize(
        "epilogue acc*(gx*gw) -> (acc*gx)*gw",
        "flashinfer_exact",
        "flashinfer_exact[epilogue=(acc*gx)*gw]",
        _ASSOCIATION,
    ),
    FieldSize(
        "epilogue one factor of Ax*Aw -> FP32 output, then Ax*Aw",
        "te_per_token[epilogue=acc*((Ax*Aw)*(1/(Mx*Mw)))]",
        "te_per_token",
        _ASSOCIATION,
    ),
    FieldSize(
        "epilogue one factor of Ax*Aw -> acc*(gx*gw)",
        "te_exact",
        "te_exact[epilogue=acc*(gx*gw)]",
        _ASSOCIATION,
    ),
)


def measure_sizes(data: LayerInput, fields: Sequence[FieldSize] = FIELD_SIZES) -> list[MeasuredSize]:
    """`fields` in their order. Raises ValueError where a spec refuses the data."""

    @cache
    def layer(label: str) -> LayerRun:
        return run_layer(data, spec_from_label(label))

    @cache
    def linear(label: str) -> torch.Tensor:
        return every_product(data, spec_from_label(label))

    sizes = []
    for field in fields:
        if field.linear:
            output = compare_outputs(linear(field.left), linear(field.right))
            sides = [_linear_operand(data, spec_from_label(label), field.operand) for label in field[1:3]]
            sizes.append(MeasuredSize(field, output, compare_operands(*sides) if field.operand else None))
        else:
            move = measure(data, layer(field.left), layer(field.right))
            sizes.append(MeasuredSize(field, move.output, move.operands.get(field.operand)))
    return sizes


def format_sizes(sizes: Mapping[str, Sequence[MeasuredSize]]) -> str:
    """Measurements under the name of their input -> Markdown: a row for each field, two columns for each input."""
    header = ["change", "expected"]
    for name in sizes:
        header += [f"{name}: L2", f"{name}: scales, codes"]
    rows = [header]
    for together in zip(*sizes.values(), strict=True):
        field = together[0].field
        row = [field.title, field.expected]
        for one in together:
            parts = [f"outputs {percent(one.output.differing)}"]
            if one.operand is not None:
                parts = [percent(one.operand.scales), percent(one.operand.codes)]
            row += [percent(one.output.relative_l2), ", ".join(parts)]
        rows.append(row)
    return markdown(rows)


def every_product(data: LayerInput, spec: ExecutionSpec) -> torch.Tensor:
    """FC1 of every token with every expert, ahead of the cast: float32 [T*E, 2F]."""
    experts = len(data.w13)
    routing = Routing.group(torch.arange(experts).expand(len(data.x), experts), experts)
    prepared = prepare(ExpertWeights.quantize(data.w13, data.w2, spec), spec)
    x = data.x.to(TORCH_TYPE[spec.operand])
    operand = grouped_operand(x, routing.tokens, routing, spec, Side.FC1_INPUT)
    return grouped_linear(operand, routing, prepared.w13, spec)


def _linear_operand(data: LayerInput, spec: ExecutionSpec, name: str) -> Operand:
    operand = TORCH_TYPE[spec.operand]
    if name == "w13":
        return weight_operand(data.w13, spec.weight, operand, halves=True)
    return activation_operand([data.x], spec.activation, operand)

"""How far two execution specs are apart on given activations and weights: stored bytes, codes, values, output.

The operands of the two FC1 products and the weights are compared as each spec quantises the same numbers. FC2's input
is compared behind the same FC1 output, that of the first spec: what differs there is due to SwiGLU, to the router
coefficient and to the quantiser, not to differences that FC1 handed on. The output is that of the whole layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kernels.experts import TORCH_TYPE, ExpertWeights
from kernels.layer_input import LayerInput
from kernels.packing import unpack
from kernels.quantize import (
    QuantizedTensor,
    dequantize,
    quantize_activation,
    quantize_weight,
    stored_scales,
)
from kernels.quantizer_spec import Block, CodeLayout, QuantizerSpec
from kernels.reference import ExpertRows, combine, expert_rows, prepare
from kernels.routing import Routing
from kernels.spec import ExecutionSpec, RouterPosition
from kernels.swiglu import cast_coefficients, fc2_input


@dataclass(frozen=True)
class OperandMove:
    """Shares of an operand's parts that differ, from 0 to 1; None where the two have no such part in common.

    memory: bytes at the same place in the stored form (codes, block scales in their order, outer scales), a surplus
        of one of them included
    scales: block-scale bytes, one for 16 elements of a row whatever shares it
    codes, values: elements
    relative_l2: of the decoded values, the difference's norm over the first one's
    """

    memory: float
    scales: float | None
    codes: float | None
    values: float
    relative_l2: float


@dataclass(frozen=True)
class OutputMove:
    """relative_l2: of the layer's output; differing: share of outputs that differ in BF16."""

    relative_l2: float
    differing: float


@dataclass(frozen=True)
class Move:
    """operands: by the names `x`, `w13`, `fc2_input`, `w2`."""

    operands: dict[str, OperandMove]
    output: OutputMove


@dataclass(frozen=True, eq=False)
class LayerRun:
    """One spec on one input: what the experts computed, and the output [T, H]."""

    spec: ExecutionSpec
    rows: ExpertRows
    output: torch.Tensor


@dataclass(frozen=True, eq=False)
class Operand:
    """Rows of K elements as a spec holds them: one or several tensors' bytes, and what they mean.

    memory: uint8, one tensor each for codes, block scales and outer scales (or the elements, unquantised)
    scales: uint8 [R, K/16]; codes: uint8 [R, K]; values: float32 [R, K]
    """

    quantizer: QuantizerSpec | None
    memory: list[torch.Tensor]
    scales: torch.Tensor | None
    codes: torch.Tensor | None
    values: torch.Tensor


def run_layer(data: LayerInput, spec: ExecutionSpec) -> LayerRun:
    """The reference layer. Raises ValueError where the spec refuses the input: a width, values that are not finite."""
    routing = Routing.group(data.topk_ids, len(data.w13))
    prepared = prepare(ExpertWeights.quantize(data.w13, data.w2, spec), spec)
    rows = expert_rows(data.x.to(TORCH_TYPE[spec.operand]), routing, prepared, data.topk_weights)
    return LayerRun(spec, rows, combine(rows.fc2, routing, data.topk_weights, spec))


def measure(data: LayerInput, left: LayerRun, right: LayerRun) -> Move:
    """From `left` to `right`, two runs on `data`."""
    return Move(
        {
            name: compare_operands(operand, other)
            for (name, operand), other in zip(
                _operands(data, left.spec, left.rows.fc1).items(),
                _operands(data, right.spec, left.rows.fc1).values(),
                strict=True,
            )
        },
        compare_outputs(left.output, right.output),
    )


def compare_operands(left: Operand, right: Operand) -> OperandMove:
    a, b = left.quantizer, right.quantizer
    scales = codes = None
    if a is not None and b is not None:
        scales = _share(left.scales, right.scales) if a.block_scale_format is b.block_scale_format else None
        codes = _share(left.codes, right.codes) if a.element is b.element else None
    return OperandMove(
        memory=_memory_share(left.memory, right.memory),
        scales=scales,
        codes=codes,
        values=_share(left.values, right.values) or 0.0,
        relative_l2=relative_l2(left.values, right.values),
    )


def compare_outputs(left: torch.Tensor, right: torch.Tensor) -> OutputMove:
    share = _share(left.to(torch.bfloat16), right.to(torch.bfloat16))
    return OutputMove(relative_l2(left, right), share or 0.0)


def relative_l2(left: torch.Tensor, right: torch.Tensor) -> float:
    """|right - left| / |left| in FP64; 0 where both are zero, infinity where only `left` is."""
    distance, size = (right.double() - left.double()).norm(), left.double().norm()
    return 0.0 if distance == 0 else float(distance / size)


def activation_operand(
    groups: Iterable[torch.Tensor], quantizer: QuantizerSpec | None, dtype: torch.dtype
) -> Operand:
    """Rows [*, K], those of one expert in each group, cast to `dtype` and quantised as the expert's input is."""
    tensors = [group.to(dtype) for group in groups]
    if quantizer is None:
        return plain_operand(torch.cat(tensors))
    return quantized_operand([quantize_activation(tensor, quantizer) for tensor in tensors], quantizer)


def weight_operand(
    weight: torch.Tensor, quantizer: QuantizerSpec | None, dtype: torch.dtype, *, halves: bool
) -> Operand:
    """[E, N, K] -> E*N rows. halves: N is gate rows, then as many up rows."""
    if quantizer is None:
        return plain_operand(weight.to(dtype).flatten(0, 1))
    return quantized_operand([quantize_weight(weight.to(dtype), quantizer, halves=halves)], quantizer)


def _operands(data: LayerInput, spec: ExecutionSpec, fc1: torch.Tensor) -> dict[str, Operand]:
    """Every quantised operand of the layer's forward, FC2's input from the given FC1 output."""
    routing = Routing.group(data.topk_ids, len(data.w13))
    own = [rows for _, rows in routing.occupied()]
    coefficients = None
    if spec.router_position is not RouterPosition.FC2_OUTPUT:
        coefficients = cast_coefficients(data.topk_weights, spec).flatten()[routing.order]
    act, x = fc2_input(fc1, coefficients, spec), data.x[routing.tokens]
    operand = TORCH_TYPE[spec.operand]
    return {
        "x": activation_operand((x[rows] for rows in own), spec.activation, operand),
        "w13": weight_operand(data.w13, spec.weight, operand, halves=True),
        "fc2_input": activation_operand((act[rows] for rows in own), spec.activation, act.dtype),
        "w2": weight_operand(data.w2, spec.weight, operand, halves=False),
    }


def plain_operand(values: torch.Tensor) -> Operand:
    """Rows [R, K] that are not quantised."""
    return Operand(None, [_bytes([values])], None, None, values.float())


def quantized_operand(parts: list[QuantizedTensor], quantizer: QuantizerSpec) -> Operand:
    """The rows of several quantised tensors, one after the other."""
    packed = quantizer.code_layout is CodeLayout.EVEN_LOW
    codes = [_rows(unpack(part.codes) if packed else part.codes) for part in parts]
    stored = [part.codes for part in parts], [stored_scales(part, quantizer) for part in parts]
    outer = [part.outer_scales for part in parts]
    scales = (
        None if quantizer.block is Block.NONE else torch.cat([_scale_each_16(p, quantizer) for p in parts])
    )
    values = torch.cat([_rows(dequantize(part, quantizer)) for part in parts])
    return Operand(
        quantizer, [_bytes(tensors) for tensors in (*stored, outer)], scales, torch.cat(codes), values
    )


def _scale_each_16(part: QuantizedTensor, quantizer: QuantizerSpec) -> torch.Tensor:
    """uint8 [R, K/16]: the block scale of every 16 elements of a row."""
    assert part.block_scales is not None
    height, width = {Block.ROW_16: (1, 1), Block.ROW_32: (1, 2), Block.TILE_16: (16, 1)}[quantizer.block]
    scales = part.block_scales.repeat_interleave(width, -1).repeat_interleave(height, -2)
    return _rows(scales[..., : part.codes.shape[-2], :])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _bytes(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor:
    flat = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors if tensor is not None]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _memory_share(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Of the bytes of the larger one of each pair, those that are other or absent in its partner."""
    differing = total = 0
    for position in range(max(len(left), len(right))):
        a, b = (side[position] if position < len(side) else side[0][:0] for side in (left, right))
        common, longest = min(len(a), len(b)), max(len(a), len(b))
        differing += int((a[:common] != b[:common]).sum()) + longest - common
        total += longest
    return differing / total if total else 0.0


def _share(left: torch.Tensor | None, right: torch.Tensor | None) -> float | None:
    """Of the elements of two tensors of one shape, those that differ; None where one is absent."""
    if left is None or right is None:
        return None
    return int((left != right).sum()) / left.numel() if left.numel() else 0.0

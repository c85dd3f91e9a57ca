"""Two computations of one expert layer on the very same input, part by part in the order in which they are made.

The parts belong to two of the three boundaries: quantised operands (w13, w2, FC1's and FC2's input) and expert outputs
(FC1, SwiGLU, FC2, combined). The third is the log-probability of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.experts import ExpertWeights
from kernels.probe import Shown
from kernels.quantize import QuantizedTensor
from kernels.quantizer_spec import Block
from kernels.spec_diff.sensitivity import (
    Operand,
    compare_operands,
    plain_operand,
    quantized_operand,
    relative_l2,
)
from rl.diagnosis.engine import Trace

OPERANDS, OUTPUTS, LOGP = "quantised operands", "expert outputs", "token log-probability"
# part -> boundary, in the order of computing
PARTS: Mapping[str, str] = {
    "w13": OPERANDS,
    "w2": OPERANDS,
    "FC1 input": OPERANDS,
    "fc1": OUTPUTS,
    "swiglu": OUTPUTS,
    "FC2 input": OPERANDS,
    "fc2": OUTPUTS,
    "combined": OUTPUTS,
    "logp": LOGP,
}


@dataclass(frozen=True)
class PartDifference:
    """How far a part differs: shares of bytes in memory, block scales, codes, outer scales and decoded values that are
    other; None where the part has none. relative_l2: of the values, over the first side's norm.
    """

    part: str
    memory: float | None
    scales: float | None
    codes: float | None
    outer_scales: float | None
    values: float
    relative_l2: float

    @property
    def boundary(self) -> str:
        return PARTS[self.part]

    @property
    def differs(self) -> bool:
        return bool(self.memory or self.values)


def compare(left: Trace, right: Trace) -> list[PartDifference]:
    """The parts that both sides show, in the order of `PARTS`, without `logp`."""
    found = []
    for part in PARTS:
        if part in ("w13", "w2"):
            if _same_bytes(left, right, part):
                found.append(_no_difference(part, left))
                continue
            pair = _weight(left, part), _weight(right, part)
        elif part in ("FC1 input", "FC2 input"):
            if part not in left.operands or part not in right.operands:
                continue
            pair = _activation(left, part), _activation(right, part)
        else:
            mine, theirs = getattr(left, part, None), getattr(right, part, None)
            if mine is not None and theirs is not None:
                found.append(_tensors(part, mine, theirs))
            continue
        found.append(_operands(part, *pair))
    return found


def _same_bytes(left: Trace, right: Trace, part: str) -> bool:
    """Whether a weight is stored as the same bytes with the same meaning: then there is nothing to decode."""
    if (left.spec.weight, left.spec.operand) != (right.spec.weight, right.spec.operand):
        return False
    mine, theirs = (
        {name: tensor for name, tensor in trace.weights.items() if name.startswith(f"{part}.")}
        for trace in (left, right)
    )
    return (
        bool(mine)
        and mine.keys() == theirs.keys()
        and all(
            tensor.dtype == theirs[name].dtype
            and torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8))
            for name, tensor in mine.items()
        )
    )


def _no_difference(part: str, trace: Trace) -> PartDifference:
    quantizer = trace.spec.weight
    if quantizer is None:
        return PartDifference(part, 0.0, None, None, None, 0.0, 0.0)
    scales = None if quantizer.block is Block.NONE else 0.0
    outer = 0.0 if f"{part}.outer_scales" in trace.weights else None
    return PartDifference(part, 0.0, scales, 0.0, outer, 0.0, 0.0)


def _operands(part: str, left: Operand, right: Operand) -> PartDifference:
    move = compare_operands(left, right)
    outer = None
    if left.quantizer is not None and right.quantizer is not None:
        a, b = left.memory[2], right.memory[2]
        if len(a) or len(b):
            outer = 1.0 if len(a) != len(b) else float((a != b).view(-1, 4).any(1).double().mean())
    return PartDifference(part, move.memory, move.scales, move.codes, outer, move.values, move.relative_l2)


def _tensors(part: str, left: torch.Tensor, right: torch.Tensor) -> PartDifference:
    """Stored in another type counts as other memory; values are compared in FP32."""
    a, b = left.float(), right.float()
    share = float((a != b).double().mean()) if a.numel() else 0.0
    memory = share if left.dtype == right.dtype else 1.0
    return PartDifference(part, memory, None, None, None, share, relative_l2(a, b))


def _weight(trace: Trace, name: str) -> Operand:
    weights = ExpertWeights.from_tensors(trace.weights, trace.spec)
    matrix = weights.w13 if name == "w13" else weights.w2
    if isinstance(matrix, torch.Tensor):
        return plain_operand(matrix.flatten(0, 1))
    assert trace.spec.weight is not None
    return quantized_operand([matrix], trace.spec.weight)


def _activation(trace: Trace, name: str) -> Operand:
    shown = trace.operands[name]
    if isinstance(shown, torch.Tensor):
        return plain_operand(shown)
    assert trace.spec.activation is not None
    return quantized_operand([_grouped(one) for one in shown], trace.spec.activation)


def _grouped(shown: Shown) -> QuantizedTensor:
    """The quantised rows in grouped order."""
    quantized, rows = shown.quantized, shown.rows
    if rows is None:
        return quantized
    assert quantized.block_scales is None or len(quantized.block_scales) == len(quantized.codes)
    parts = (quantized.codes, quantized.block_scales, quantized.outer_scales)
    return QuantizedTensor(*(None if part is None else part[rows] for part in parts))  # type: ignore[arg-type]


def differing_experts(left: Trace, right: Trace) -> dict[str, list[int]]:
    """Stored weight tensor -> the experts whose part of it differs; only tensors that differ."""
    found = {}
    for name, tensor in left.weights.items():
        other = right.weights.get(name)
        if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype:
            continue
        wrong = (tensor != other).flatten(1).any(1)
        if bool(wrong.any()):
            found[name] = wrong.nonzero().flatten().tolist()
    return found

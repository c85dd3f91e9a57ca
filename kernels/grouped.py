"""Products of rows with the weights of their experts, outer scales included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernels.accumulate import product
from kernels.guard import NonFiniteGuard, Operand
from kernels.packed_rows import PackedRows
from kernels.probe import Shown, show
from kernels.quantize import NonFiniteReport, QuantizedTensor, decode, decode_scale, quantize_activation
from kernels.quantizer_spec import Block, BlockScaleFormat, QuantizerSpec, ScaleDomain
from kernels.routing import Routing
from kernels.scales import outer_divisor, outer_scales
from kernels.spec import Epilogue, ExecutionSpec

_TAKES_AMAX = (Epilogue.AMAX_ALPHA, Epilogue.AMAX_AFTER)


@dataclass(frozen=True, eq=False)
class Decoded:
    """An operand as a product takes it.

    elements: [R, K] or [E, N, K]. Quantised: code times block scale, exact (bfloat16; float32 with E8M0 scales);
        else the plain values.
    outer_scales: what the epilogue multiplies, float32 [R, 1] or [1, 1], [E, N] or [E, 1]: the decode scale g, or
        the largest magnitude A for an epilogue that takes that. None without outer scales.
    """

    elements: torch.Tensor
    outer_scales: torch.Tensor | None

    @classmethod
    def of(cls, quantized: QuantizedTensor, quantizer: QuantizerSpec, epilogue: Epilogue) -> Decoded:
        """`expert_half` scales become one for each row."""
        # The product of an E4M3 element and a small power of two can be below BF16's subnormal numbers.
        wide = quantizer.block_scale_format is BlockScaleFormat.E8M0
        elements = decode(quantized, quantizer, torch.float32 if wide else torch.bfloat16)
        outer = quantized.outer_scales if epilogue in _TAKES_AMAX else decode_scale(quantized, quantizer)
        if outer is not None and quantizer.outer_domain is ScaleDomain.EXPERT_HALF and outer.shape[1] == 2:
            outer = outer.repeat_interleave(elements.shape[1] // 2, dim=1)
        return cls(elements, outer)

    def dequantized(self, quantizer: QuantizerSpec, epilogue: Epilogue) -> torch.Tensor:
        """float32, the shape of `elements`: elements times g (one FP32 rounding)."""
        if self.outer_scales is None:
            return self.elements.float()
        outer = self.outer_scales
        if epilogue in _TAKES_AMAX:
            outer = outer_scales(outer, quantizer).decode
        return self.elements.float() * (outer if self.elements.dim() == 2 else outer.unsqueeze(-1))

    def select(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Decoded:
        """`change` of the elements and of the outer scales."""
        return Decoded(
            change(self.elements), None if self.outer_scales is None else change(self.outer_scales)
        )


def grouped_operand(
    x: torch.Tensor | PackedRows,
    rows: torch.Tensor | None,
    routing: Routing,
    spec: ExecutionSpec,
    name: Operand,
    guard: NonFiniteGuard | None = None,
) -> Decoded:
    """The rows of x [*, K] that the experts multiply, in grouped order, under `spec.activation`.

    x: packed, where it was quantised under that already. rows: which row of x is each grouped row; None when x is
    grouped already.
    """
    quantizer = spec.activation
    if isinstance(x, PackedRows):
        assert quantizer is not None
        return _packed(x, rows, routing, quantizer, spec.epilogue, name, guard)
    if quantizer is None:
        plain = x if rows is None else x[rows]
        show(name, plain)
        return Decoded(plain, None)
    if quantizer.outer_domain is not ScaleDomain.TENSOR and quantizer.block is not Block.TILE_16:
        # A row's scales depend on that row alone: it is quantised once for all its slots.
        def record(bad: torch.Tensor) -> None:
            assert guard is not None
            guard.record(name, bad if rows is None else bad[rows], routing.experts)

        operand = _quantized(x, rows, quantizer, spec.epilogue, name, None if guard is None else record)
        return operand if rows is None else operand.select(lambda tensor: tensor[rows])
    grouped = x if rows is None else x[rows]
    parts = []
    for expert, own in routing.occupied() or [(0, slice(0, 0))]:
        record_expert = None if guard is None else partial(guard.record, name, experts=expert)
        part = _quantized(
            grouped[own], None, quantizer, spec.epilogue, name, record_expert, f" of expert {expert}"
        )
        count = own.stop - own.start
        parts.append(part.select(partial(_rows, count=count)))
    scales = [part.outer_scales for part in parts if part.outer_scales is not None]
    return Decoded(torch.cat([part.elements for part in parts]), torch.cat(scales) if scales else None)


def grouped_linear(operand: Decoded, routing: Routing, weight: Decoded, spec: ExecutionSpec) -> torch.Tensor:
    """Each grouped row times the transpose of its expert's [N, K]: float32 [T*k, N]."""
    output = operand.elements.new_empty(len(operand.elements), weight.elements.shape[1], dtype=torch.float32)
    for expert, own in routing.occupied():
        row_scales = None if operand.outer_scales is None else operand.outer_scales[own]
        column_scales = None if weight.outer_scales is None else weight.outer_scales[expert]
        accumulator = product(operand.elements[own], weight.elements[expert], spec.accumulation)
        output[own] = _epilogue(accumulator, row_scales, column_scales, spec)
    return output


def _rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """[count, *] or [1, *] -> [count, *]."""
    return tensor.expand(count, -1)


def _quantized(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    quantizer: QuantizerSpec,
    epilogue: Epilogue,
    name: Operand,
    record: NonFiniteReport | None,
    whose: str = "",
) -> Decoded:
    quantized = quantize_activation(x, quantizer, what=f"{name}{whose}", on_non_finite=record)
    show(name, Shown(quantized, rows))
    return Decoded.of(quantized, quantizer, epilogue)


def _packed(
    x: PackedRows,
    rows: torch.Tensor | None,
    routing: Routing,
    quantizer: QuantizerSpec,
    epilogue: Epilogue,
    name: Operand,
    guard: NonFiniteGuard | None,
) -> Decoded:
    index = x.index if rows is None else x.index[rows]
    bad = x.bad[index]
    if guard is not None:
        guard.record(name, bad, routing.experts)
    elif bad.any():
        raise ValueError(f"{int(bad.sum())} of {len(bad)} rows of {name} held values that are not finite")
    show(name, Shown(x.quantized(), index))
    return Decoded.of(x.quantized(), quantizer, epilogue).select(lambda tensor: tensor[index])


def _epilogue(
    accumulator: torch.Tensor,
    row_scales: torch.Tensor | None,
    column_scales: torch.Tensor | None,
    spec: ExecutionSpec,
) -> torch.Tensor:
    """Multiply the outer scales [R, 1] and [N] or [1] into float32 [R, N], in place. A missing scale is 1."""
    if row_scales is None and column_scales is None:
        return accumulator
    rows = accumulator.new_ones(1) if row_scales is None else row_scales
    columns = accumulator.new_ones(1) if column_scales is None else column_scales
    match spec.epilogue:
        case Epilogue.OUTER_PRODUCT_FIRST:
            return accumulator.mul_(rows * columns)
        case Epilogue.ACTIVATION_FIRST:
            return accumulator.mul_(rows).mul_(columns)
        case Epilogue.AMAX_ALPHA:
            return accumulator.mul_((rows * columns) * inverse_divisors(spec))
        case Epilogue.AMAX_AFTER:
            return accumulator.mul_(inverse_divisors(spec)).mul_(rows * columns)
        case Epilogue.NONE:
            raise AssertionError(f"{spec.name!r} has outer scales and no epilogue")


def inverse_divisors(spec: ExecutionSpec) -> float:
    """1/(Mx*Mw) as FP32 has it: both operations are exact or correctly rounded twice over in FP64."""
    assert spec.activation is not None and spec.weight is not None
    divisors = outer_divisor(spec.activation) * outer_divisor(spec.weight)
    return torch.tensor(1 / divisors, dtype=torch.float32).item()

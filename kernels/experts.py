"""The weights of one layer's experts as a spec stores them, and as they travel from learner to sampler."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kernels.quantize import QuantizedTensor, logical_scales, quantize_weight, stored_scales
from kernels.quantizer_spec import Block, CodeLayout, QuantizerSpec, ScaleDomain, ScaleLayout
from kernels.spec import ExecutionSpec, FloatType
from kernels.swizzle import swizzled_size

_WIRE_NAME = re.compile(r"model\.layers\.(\d+)\.experts\.(.+)")
TORCH_TYPE = {FloatType.BF16: torch.bfloat16, FloatType.FP32: torch.float32}
WeightQuantizer = Callable[..., QuantizedTensor]
_BLOCK_SHAPE = {
    Block.ROW_16: (1, 16),
    Block.ROW_32: (1, 32),
    Block.TILE_16: (16, 16),
}  # rows, elements along K


def wire_name(layer: int, part: str) -> str:
    """The name under which part `part` (a key of `ExpertWeights.tensors`) of layer `layer` travels."""
    return f"model.layers.{layer}.experts.{part}"


def derived_name(layer: int, part: str) -> str:
    """The name of what an engine derives from a layer's stored tensors, a key of `PreparedExperts.derived`."""
    return wire_name(layer, f"derived.{part}")


def split_wire_name(name: str) -> tuple[int, str] | None:
    """The inverse of `wire_name`; None for a name that is not one of an expert tensor."""
    match = _WIRE_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """E experts: FC1 `w13` [E, 2F, H] (F gate rows, then F up rows) and FC2 `w2` [E, H, F].

    stored: what is kept and sent. For each matrix either `w13.weight`, a tensor of the spec's operand type, or
    `w13.codes`, `w13.block_scales` (in the spec's order in memory; absent without blocks) and `w13.outer_scales`
    (absent without outer scales).
    """

    stored: Mapping[str, torch.Tensor]
    spec: ExecutionSpec

    @classmethod
    def quantize(
        cls,
        w13: torch.Tensor,
        w2: torch.Tensor,
        spec: ExecutionSpec,
        quantizer: WeightQuantizer = quantize_weight,
    ) -> ExpertWeights:
        """A snapshot of the master weights (BF16 or FP32, shapes as above) under `spec`.

        quantizer: does what `kernels.quantize.quantize_weight` does. Raises ValueError for shapes that do not fit each
        other and for weights that the quantiser refuses.
        """
        experts, two_ffn, hidden = w13.shape
        if two_ffn % 2 or w2.shape != (experts, hidden, two_ffn // 2):
            found = f"{tuple(w13.shape)} and {tuple(w2.shape)}"
            raise ValueError(f"expert weights must be w13 [E, 2F, H] and w2 [E, H, F], got {found}")
        stored: dict[str, torch.Tensor] = {}
        for name, master in (("w13", w13), ("w2", w2)):
            operand = master.detach().to(TORCH_TYPE[spec.operand], copy=spec.weight is None)
            if spec.weight is None:
                stored[f"{name}.weight"] = operand
                continue
            quantized = quantizer(operand, spec.weight, halves=name == "w13")
            parts = {
                "codes": quantized.codes,
                "block_scales": stored_scales(quantized, spec.weight),
                "outer_scales": quantized.outer_scales,
            }
            stored |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
        return cls(stored, spec)

    @classmethod
    def empty(
        cls, num_experts: int, hidden: int, ffn: int, spec: ExecutionSpec, device: torch.device | str = "cpu"
    ) -> ExpertWeights:
        """Tensors of the right names, dtypes and shapes, all zero, to be filled."""
        layout = expert_layout(num_experts, hidden, ffn, spec).items()
        stored = {key: torch.zeros(shape, dtype=dtype, device=device) for key, (shape, dtype) in layout}
        return cls(stored, spec)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], spec: ExecutionSpec) -> ExpertWeights:
        """The inverse of `tensors()`.

        Raises ValueError for names, dtypes or shapes that are not those of `spec` or do not fit each other.
        """
        widest = "w13.weight" if spec.weight is None else "w13.codes"
        if widest not in tensors or tensors[widest].dim() != 3:
            raise ValueError(f"experts under {spec.name!r} need {widest} [E, 2F, *], got {sorted(tensors)}")
        experts, two_ffn, width = tensors[widest].shape
        layout = expert_layout(experts, width * _codes_per_byte(spec.weight), two_ffn // 2, spec)
        problems = [f"{key} is unknown" for key in sorted(tensors.keys() - layout.keys())]
        for key, (shape, dtype) in layout.items():
            if key not in tensors:
                problems.append(f"{key} is missing")
            elif tensors[key].dtype != dtype or tuple(tensors[key].shape) != shape:
                found = f"{tensors[key].dtype} {tuple(tensors[key].shape)}"
                problems.append(f"{key} is {found}, expected {dtype} {shape}")
        if problems:
            raise ValueError(
                f"expert weights do not fit execution spec {spec.name!r}: " + "; ".join(problems)
            )
        return cls({key: tensors[key] for key in layout}, spec)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors themselves, in a fixed order."""
        return dict(self.stored)

    @property
    def w13(self) -> QuantizedTensor | torch.Tensor:
        """FC1, with block scales in the order of the elements: the stored tensors where that is their order."""
        return self._matrix("w13")

    @property
    def w2(self) -> QuantizedTensor | torch.Tensor:
        """FC2, as `w13`."""
        return self._matrix("w2")

    def _matrix(self, name: str) -> QuantizedTensor | torch.Tensor:
        quantizer = self.spec.weight
        if quantizer is None:
            return self.stored[f"{name}.weight"]
        codes, scales = self.stored[f"{name}.codes"], self.stored.get(f"{name}.block_scales")
        if scales is not None:
            rows, width = codes.shape[1], codes.shape[2] * _codes_per_byte(quantizer)
            scales = logical_scales(scales, quantizer, rows, width)
        return QuantizedTensor(codes, scales, self.stored.get(f"{name}.outer_scales"))


def operand_layout(
    stored: Mapping[str, tuple[int, ...]], spec: ExecutionSpec
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes of the stored tensors -> shape and dtype of what they are made of, `w13.weight` and `w2.weight`."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in ("w13", "w2"):
        if spec.weight is None:
            shape = stored[f"{name}.weight"]
        else:
            *rows, width = stored[f"{name}.codes"]
            shape = (*rows, width * _codes_per_byte(spec.weight))
        shapes[f"{name}.weight"] = (shape, TORCH_TYPE[spec.operand])
    return shapes


def _codes_per_byte(quantizer: QuantizerSpec | None) -> int:
    return 2 if quantizer is not None and quantizer.code_layout is CodeLayout.EVEN_LOW else 1


def expert_layout(
    experts: int, hidden: int, ffn: int, spec: ExecutionSpec
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every stored tensor, in the order of `ExpertWeights.tensors`. Raises ValueError for widths
    that the spec cannot hold.
    """
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, rows, width in (("w13", 2 * ffn, hidden), ("w2", hidden, ffn)):
        if width == 0 or width % spec.width_multiple:
            expected = f"rows of a positive multiple of {spec.width_multiple} elements"
            raise ValueError(f"{name} under {spec.name!r} must have {expected}, got {width}")
        if spec.weight is None:
            layout[f"{name}.weight"] = ((experts, rows, width), TORCH_TYPE[spec.operand])
            continue
        layout[f"{name}.codes"] = ((experts, rows, width // _codes_per_byte(spec.weight)), torch.uint8)
        if spec.weight.block is not Block.NONE:
            layout[f"{name}.block_scales"] = (_scales_shape(experts, rows, width, spec.weight), torch.uint8)
        if spec.weight.outer_domain is not ScaleDomain.NONE:
            halves = 2 if name == "w13" else 1
            outer = {ScaleDomain.ROW: rows, ScaleDomain.EXPERT: 1, ScaleDomain.EXPERT_HALF: halves}
            layout[f"{name}.outer_scales"] = ((experts, outer[spec.weight.outer_domain]), torch.float32)
    return layout


def _scales_shape(experts: int, rows: int, width: int, quantizer: QuantizerSpec) -> tuple[int, ...]:
    block_rows, block_width = _BLOCK_SHAPE[quantizer.block]
    if quantizer.scale_layout is ScaleLayout.SWIZZLED_128X4:
        return (experts, swizzled_size(rows, width // block_width))  # a scale for every row
    return (experts, -(-rows // block_rows), width // block_width)

"""The weights of one layer's experts as a spec stores them, and as they travel from learner to sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.quantize import BLOCK, QuantizedTensor, quantize_weight
from kernels.spec import ExecutionSpec, FloatType, WeightScaleDomain

TORCH_TYPE = {FloatType.BF16: torch.bfloat16, FloatType.FP32: torch.float32}
_PARTS = ("codes", "block_scales", "outer_scales")


def wire_name(layer: int, part: str) -> str:
    """The name under which part `part` (a key of `ExpertWeights.tensors`) of layer `layer` travels."""
    return f"model.layers.{layer}.experts.{part}"


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """E experts: FC1 `w13` [E, 2F, H] (F gate rows, then F up rows) and FC2 `w2` [E, H, F].

    Each is a `QuantizedTensor` under an NVFP4 spec, else a tensor of the spec's operand type.
    """

    w13: QuantizedTensor | torch.Tensor
    w2: QuantizedTensor | torch.Tensor

    @classmethod
    def quantize(cls, w13: torch.Tensor, w2: torch.Tensor, spec: ExecutionSpec) -> ExpertWeights:
        """A snapshot of the master weights (BF16 or FP32, shapes as above) under `spec`.

        Raises ValueError for shapes that do not fit each other and for weights `quantize_weight` refuses.
        """
        experts, two_ffn, hidden = w13.shape
        if two_ffn % 2 or w2.shape != (experts, hidden, two_ffn // 2):
            found = f"{tuple(w13.shape)} and {tuple(w2.shape)}"
            raise ValueError(f"expert weights must be w13 [E, 2F, H] and w2 [E, H, F], got {found}")
        if spec.quantized:
            return cls(quantize_weight(w13, spec), quantize_weight(w2, spec))
        dtype = TORCH_TYPE[spec.operand]
        return cls(w13.detach().to(dtype, copy=True), w2.detach().to(dtype, copy=True))

    @classmethod
    def empty(
        cls, num_experts: int, hidden: int, ffn: int, spec: ExecutionSpec, device: torch.device | str = "cpu"
    ) -> ExpertWeights:
        """Tensors of the right names, dtypes and shapes, all zero, to be filled."""
        layout = _layout(num_experts, hidden, ffn, spec).items()
        tensors = {key: torch.zeros(shape, dtype=dtype, device=device) for key, (shape, dtype) in layout}
        return cls._assemble(tensors, spec)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], spec: ExecutionSpec) -> ExpertWeights:
        """The inverse of `tensors()`.

        Raises ValueError for names, dtypes or shapes that are not those of `spec` or do not fit each other.
        """
        widest = "w13.codes" if spec.quantized else "w13.weight"
        if widest not in tensors or tensors[widest].dim() != 3:
            raise ValueError(f"experts under {spec.name!r} need {widest} [E, 2F, *], got {sorted(tensors)}")
        experts, two_ffn, hidden = tensors[widest].shape
        if spec.quantized:
            hidden *= 2
        layout = _layout(experts, hidden, two_ffn // 2, spec)
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
        return cls._assemble(tensors, spec)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors: `codes`, `block_scales` and `outer_scales`, or `weight`, of `w13` and `w2`."""
        stored: dict[str, torch.Tensor] = {}
        for name, matrix in (("w13", self.w13), ("w2", self.w2)):
            if isinstance(matrix, QuantizedTensor):
                stored |= {f"{name}.{part}": getattr(matrix, part) for part in _PARTS}
            else:
                stored[f"{name}.weight"] = matrix
        return stored

    @classmethod
    def _assemble(cls, tensors: Mapping[str, torch.Tensor], spec: ExecutionSpec) -> ExpertWeights:
        if not spec.quantized:
            return cls(tensors["w13.weight"], tensors["w2.weight"])
        w13, w2 = (QuantizedTensor(*(tensors[f"{name}.{part}"] for part in _PARTS)) for name in ("w13", "w2"))
        return cls(w13, w2)


def _layout(
    experts: int, hidden: int, ffn: int, spec: ExecutionSpec
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every stored tensor."""
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, rows, width in (("w13", 2 * ffn, hidden), ("w2", hidden, ffn)):
        if not spec.quantized:
            layout[f"{name}.weight"] = ((experts, rows, width), TORCH_TYPE[spec.operand])
            continue
        if width == 0 or width % BLOCK:
            raise ValueError(f"{name} must have rows of a positive multiple of {BLOCK} elements, got {width}")
        outer = rows if spec.weight_scale_domain is WeightScaleDomain.ROW else 1
        layout[f"{name}.codes"] = ((experts, rows, width // 2), torch.uint8)
        layout[f"{name}.block_scales"] = ((experts, rows, width // BLOCK), torch.uint8)
        layout[f"{name}.outer_scales"] = ((experts, outer), torch.float32)
    return layout

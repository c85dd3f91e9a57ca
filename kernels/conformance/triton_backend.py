"""The back ends of a GPU, `kernels.backends`: on the GPU, or in Triton's interpreter where TRITON_INTERPRET=1 says so.

Quantised operands are decoded to f16 and multiplied by 16-bit tensor cores, whatever the GPU has ("emulated").
"""

from __future__ import annotations

import importlib

import torch
import triton

from kernels import quantize as reference
from kernels.experts import ExpertWeights
from kernels.quantize import QuantizedTensor
from kernels.quantizer_spec import QuantizerSpec, Rounding, ScaleDomain
from kernels.spec import Epilogue, ExecutionSpec
from kernels.swizzle import unswizzle_128x4
from kernels.triton.grouping import group
from kernels.triton.quantize import permute_quantize, quantize_rows, report
from kernels.triton.support import layer_problem, quantizer_problem
from kernels.triton.weights import quantize_weight


class TritonBackend:
    """Raises ValueError where there is neither a GPU nor the interpreter."""

    name = "triton_emulated"

    def __init__(self) -> None:
        self.device = _device(self.name)

    def claims(self, spec: ExecutionSpec) -> bool:
        if (
            spec.activation is None
            or spec.weight is None
            or spec.epilogue is not Epilogue.OUTER_PRODUCT_FIRST
        ):
            return False
        problems = (
            layer_problem(spec),
            quantizer_problem(spec.activation, (ScaleDomain.TOKEN,)),
            quantizer_problem(spec.weight, (ScaleDomain.ROW, ScaleDomain.EXPERT)),
        )
        return spec.gradient is None and not any(problems)

    def quantize_activation(self, x: torch.Tensor, spec: QuantizerSpec) -> QuantizedTensor:
        return quantize_rows(x, spec)

    def quantize_weight(self, weight: torch.Tensor, spec: QuantizerSpec, *, halves: bool) -> QuantizedTensor:
        return quantize_weight(weight, spec, halves=halves)

    def stored_scales(self, quantized: QuantizedTensor, spec: QuantizerSpec) -> torch.Tensor | None:
        return reference.stored_scales(quantized, spec)

    def permute_quantize(
        self, x: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, spec: QuantizerSpec
    ) -> QuantizedTensor:
        groups = group(topk_ids, num_experts)
        operand = permute_quantize(x, groups, spec, packed=True, decoded=False)
        used = groups.slot_of_row >= 0
        report(operand.bad & used, x, "activation")
        assert operand.codes is not None and operand.block_scales is not None
        scales = unswizzle_128x4(operand.block_scales, groups.rows, x.shape[1] // 16)
        return QuantizedTensor(operand.codes[used], scales[used], operand.outer_scales[used, None])

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: ExpertWeights,
        spec: ExecutionSpec,
    ) -> torch.Tensor:
        from kernels.triton import layer

        return layer.forward(x, topk_ids, topk_weights, layer.prepare(weights, spec), spec)


class GroupedBf16Backend:
    """PyTorch's grouped BF16 products: specs without quantisers. Raises ValueError as `TritonBackend` does."""

    name = "grouped_bf16"

    def __init__(self) -> None:
        self.device = _device(self.name)

    def claims(self, spec: ExecutionSpec) -> bool:
        return not spec.strict and _computes("kernels.triton.plain_layer", spec)

    def quantize_activation(self, x: torch.Tensor, spec: QuantizerSpec) -> QuantizedTensor:
        raise ValueError(f"{self.name} computes specs without quantisers alone")

    def quantize_weight(self, weight: torch.Tensor, spec: QuantizerSpec, *, halves: bool) -> QuantizedTensor:
        raise ValueError(f"{self.name} computes specs without quantisers alone")

    def stored_scales(self, quantized: QuantizedTensor, spec: QuantizerSpec) -> torch.Tensor | None:
        raise ValueError(f"{self.name} computes specs without quantisers alone")

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: ExpertWeights,
        spec: ExecutionSpec,
    ) -> torch.Tensor:
        from kernels.triton import plain_layer

        return plain_layer.forward(x, topk_ids, topk_weights, plain_layer.prepare(weights, spec), spec)


class PerTensorBackend:
    """One scale a tensor: `te_per_tensor` and `te_exact`. Raises ValueError as `TritonBackend` does."""

    name = "triton_per_tensor"

    def __init__(self) -> None:
        self.device = _device(self.name)

    def claims(self, spec: ExecutionSpec) -> bool:
        return not spec.strict and _computes("kernels.triton.per_tensor_layer", spec)

    def quantize_activation(self, x: torch.Tensor, spec: QuantizerSpec) -> QuantizedTensor:
        """Rows are those of one expert. Raises ValueError for stochastic rounding, which needs a seed."""
        if spec.rounding is Rounding.STOCHASTIC:
            raise ValueError("stochastic rounding needs a seed")
        found = self.quantize_weight(x[None], spec, halves=False)
        assert found.block_scales is not None
        return QuantizedTensor(found.codes[0], found.block_scales[0], found.outer_scales)

    def quantize_weight(self, weight: torch.Tensor, spec: QuantizerSpec, *, halves: bool) -> QuantizedTensor:
        from kernels.triton import per_tensor

        if weight.shape[-1] % spec.width_multiple or not weight.shape[-1]:
            raise ValueError(f"rows must be a multiple of {spec.width_multiple} elements")
        return per_tensor.quantize_weight(weight)

    def stored_scales(self, quantized: QuantizedTensor, spec: QuantizerSpec) -> torch.Tensor | None:
        return reference.stored_scales(quantized, spec)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: ExpertWeights,
        spec: ExecutionSpec,
    ) -> torch.Tensor:
        from kernels.triton import per_tensor_layer as layer

        return layer.forward(x, topk_ids, topk_weights, layer.prepare(weights, spec), spec)


def _device(name: str) -> torch.device:
    interpreted = bool(triton.knobs.runtime.interpret)
    if not interpreted and not torch.cuda.is_available():
        raise ValueError(f"{name} needs an NVIDIA GPU, or TRITON_INTERPRET=1 for the interpreter")
    return torch.device("cpu" if interpreted else "cuda")


def _computes(module: str, spec: ExecutionSpec) -> bool:
    try:
        importlib.import_module(module).check_spec(spec)
    except ValueError:
        return False
    return True


BACKEND = TritonBackend()
GROUPED_BF16 = GroupedBf16Backend()
PER_TENSOR = PerTensorBackend()

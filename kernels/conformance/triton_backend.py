"""The Triton kernels as a back end: on the GPU, or in Triton's interpreter where TRITON_INTERPRET=1 says so.

Operands are decoded to f16 and multiplied by 16-bit tensor cores, whatever the GPU has ("emulated").
"""

from __future__ import annotations

import torch
import triton

from kernels import quantize as reference
from kernels.experts import ExpertWeights
from kernels.quantize import QuantizedTensor
from kernels.quantizer_spec import QuantizerSpec, ScaleDomain
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
        interpreted = bool(triton.knobs.runtime.interpret)
        if not interpreted and not torch.cuda.is_available():
            raise ValueError(f"{self.name} needs an NVIDIA GPU, or TRITON_INTERPRET=1 for the interpreter")
        self.device = torch.device("cpu" if interpreted else "cuda")

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


BACKEND = TritonBackend()

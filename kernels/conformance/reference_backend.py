"""The reference as a back end: what `kernels.quantize` and `kernels.reference` compute on the CPU."""

from __future__ import annotations

import torch

from kernels import quantize, reference
from kernels.experts import ExpertWeights
from kernels.quantize import QuantizedTensor
from kernels.quantizer_spec import QuantizerSpec
from kernels.spec import ExecutionSpec


class ReferenceBackend:
    name = "reference"
    device = torch.device("cpu")

    def claims(self, spec: ExecutionSpec) -> bool:
        return True

    def quantize_activation(self, x: torch.Tensor, spec: QuantizerSpec) -> QuantizedTensor:
        return quantize.quantize_activation(x, spec)

    def quantize_weight(self, weight: torch.Tensor, spec: QuantizerSpec, *, halves: bool) -> QuantizedTensor:
        return quantize.quantize_weight(weight, spec, halves=halves)

    def stored_scales(self, quantized: QuantizedTensor, spec: QuantizerSpec) -> torch.Tensor | None:
        return quantize.stored_scales(quantized, spec)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        weights: ExpertWeights,
        spec: ExecutionSpec,
    ) -> torch.Tensor:
        return reference.forward(x, topk_ids, topk_weights, reference.prepare(weights, spec), spec)


BACKEND = ReferenceBackend()

"""Quantisers of libraries as conformance takes them."""

from __future__ import annotations

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from kernels.conformance import Adapter
from kernels.quantize import QuantizedTensor


def _torchao(x: torch.Tensor) -> QuantizedTensor:
    g = per_tensor_amax_to_scale(x.abs().amax() if len(x) else x.new_zeros(()))
    scales, codes = nvfp4_quantize(x.contiguous(), per_tensor_scale=g)
    return QuantizedTensor(codes, scales.view(torch.uint8), g.view(1, 1))


def _compressed_tensors(x: torch.Tensor) -> QuantizedTensor:
    weights, blocks = preset_name_to_scheme("NVFP4", ["Linear"]).weights, x.float().unflatten(-1, (-1, 16))
    low, high = blocks.amin(-1), blocks.amax(-1)
    encode = generate_gparam(*(blocks.aminmax() if len(x) else (torch.zeros(()), torch.zeros(()))))
    scales, zero_points = calculate_qparams(low, high, weights, encode)
    with torch.compiler.set_stance("force_eager"):
        values = quantize(x.float(), scales, zero_points, weights, global_scale=encode)
    codes = pack_fp4_to_uint8(values)
    return QuantizedTensor(codes, scales.to(torch.float8_e4m3fn).view(torch.uint8), encode.view(1, 1))


TORCHAO = Adapter("torchao 0.18.0", _torchao)
COMPRESSED_TENSORS = Adapter("compressed-tensors 0.17.0", _compressed_tensors)

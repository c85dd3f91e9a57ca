"""Quantisers of libraries that are installed: torchao, compressed-tensors, vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import quantize as compressed_tensors_quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from oracles.loading import functions, installed_source
from oracles.result import Result, of_tensors

VLLM_EMULATION = "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"


def torchao_nvfp4(x: torch.Tensor) -> Result:
    g = per_tensor_amax_to_scale(x.abs().max())
    scales, codes = nvfp4_quantize(x, per_tensor_scale=g)
    return of_tensors(codes, scales, g)


def torchao_mx(x: torch.Tensor, element: Any, mode: ScaleCalculationMode) -> Result:
    """element: torchao's name of the element type."""
    scales, codes = to_mx(x, element, 32, mode)
    return of_tensors(codes, scales, packed=element is torch.float4_e2m1fn_x2)


def compressed_tensors_nvfp4(x: torch.Tensor) -> Result:
    """Minima and maxima in FP32: from BF16 ones, the library would also divide in BF16."""
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    blocks = x.float().unflatten(-1, (-1, 16))
    encode = generate_gparam(blocks.min(), blocks.max())
    scales, zero_points = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, encode)
    with torch.compiler.set_stance("force_eager"):
        values = compressed_tensors_quantize(
            x.float(), scales, zero_points, scheme.weights, global_scale=encode
        )
    return of_tensors(pack_fp4_to_uint8(values), scales.to(torch.float8_e4m3fn), encode)


def vllm_reference(x: torch.Tensor, encode: torch.Tensor) -> Result:
    """vLLM's emulation on devices other than GPUs, from the encode scale S."""
    source = functions(
        installed_source(VLLM_EMULATION),
        ("get_reciprocal", "cast_to_fp4", "ref_nvfp4_quant"),
        torch=torch,
        FLOAT4_E2M1_MAX_RECIPROCAL=1 / 6,
    )
    values, scales = source["ref_nvfp4_quant"](x, encode, 16)
    return of_tensors(pack_fp4_to_uint8(values), scales.to(torch.float8_e4m3fn))


class _Pointer:
    """Flat memory and positions in it, as a Triton kernel sees a tensor."""

    def __init__(self, memory: torch.Tensor, at: torch.Tensor | int = 0):
        self.memory, self.at = memory, at

    def __add__(self, offset: torch.Tensor | int) -> _Pointer:
        return _Pointer(self.memory, self.at + offset)


def _load(pointer: _Pointer, mask: torch.Tensor | None = None, other: float = 0.0) -> torch.Tensor:
    at = torch.as_tensor(pointer.at)
    return pointer.memory[at] if mask is None else torch.where(mask, pointer.memory[at * mask], other)


def _store(pointer: _Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    where = mask.expand_as(value)
    pointer.memory[torch.as_tensor(pointer.at)[where]] = value[where].to(pointer.memory.dtype)


def _scalars(condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    return torch.where(condition, torch.as_tensor(a).float(), torch.as_tensor(b).float())


def vllm_triton(x: torch.Tensor, encode: torch.Tensor) -> np.ndarray:
    """float32 [R, K]: quantised and decoded by the text of vLLM's Triton kernel, its operations those of torch.

    Division is correctly rounded here; Triton's `/` on a GPU is within two units in the last place.
    """
    program = [0, 0]
    language = SimpleNamespace(
        program_id=lambda axis: torch.tensor(program[axis]),
        arange=torch.arange,
        load=_load,
        store=_store,
        max=lambda value, axis: value.amax(axis),
        abs=torch.abs,
        clamp=torch.clamp,
        where=_scalars,
        constexpr=object,
        float32=torch.float32,
        float8e4nv=torch.float8_e4m3fn,
        int64=torch.int64,
    )
    names = ("_nvfp4_quant_dequant_kernel", "_round_to_fp4")
    kernel = functions(installed_source(VLLM_EMULATION), names, tl=language)[names[0]]
    rows, width = x.shape
    output = torch.empty(rows * width)
    for program[0] in range(rows):
        pointers = _Pointer(x.flatten()), _Pointer(output), _Pointer(encode.flatten())
        kernel(*pointers, width, width // 16, 16, 1 / 6, width // 16)
    return output.view(rows, width).numpy()


def every_float32_neighbour(points: np.ndarray) -> Iterator[np.ndarray]:
    """The points, and the float32 numbers next to them on both sides."""
    single = points.astype(np.float32)
    yield single
    yield np.nextafter(single, np.float32(-np.inf))
    yield np.nextafter(single, np.float32(np.inf))


def compressed_tensors_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [R, K] and decode scales float32 [R, 1] of dynamic FP8 per token."""
    scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]).input_activations
    scales, zero_points = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), scheme)
    values = compressed_tensors_quantize(x, scales, zero_points, scheme)
    return values.to(torch.float8_e4m3fn).view(torch.uint8), scales

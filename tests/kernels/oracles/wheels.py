"""Quantisers of libraries whose wheels are at hand: FlashInfer, fouroversix, TensorRT Model Optimizer."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from oracles.loading import archived_source, functions, load, wheel
from oracles.result import Result, of_tensors


@cache
def _flashinfer() -> ModuleType:
    packages = ("flashinfer", "flashinfer.batch_invariant", "flashinfer.batch_invariant.quantization")
    return load(wheel("flashinfer_python"), f"{packages[-1]}.nvfp4_reference", *packages)


def flashinfer_nvfp4(x: torch.Tensor, *, per_token: bool) -> Result:
    """The reference of `batch_invariant=True`, with the scale of the whole tensor or of each row."""
    library = _flashinfer()
    rows, width = x.shape
    scale = (
        1 / torch.tensor(2688.0)
        if per_token
        else (2688 / x.float().abs().max()).clamp(max=3.4028234663852886e38)
    )
    codes, scales, g = library.quantize_reference(x, scale, per_token=per_token)
    return of_tensors(codes, library.unswizzle_sf_128x4(scales, rows, width), g if per_token else 1 / scale)


def flashinfer_swizzle(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [R, C] in FlashInfer's order, flat."""
    return _flashinfer().swizzle_sf_128x4(scales, len(scales), scales.shape[1] * 16).flatten()


def flashinfer_exact_rows(x: torch.Tensor, rows: list[int]) -> Result:
    """Some rows of the same, one FP32 operation at a time in exact fractions; slow."""
    return of_tensors(*_flashinfer().exact_rows(x, 1 / 2688, rows, per_token=True))


@cache
def _fouroversix() -> tuple[ModuleType, ModuleType]:
    archive = wheel("fouroversix")
    packages = ("fouroversix", "fouroversix.quantize", "fouroversix.quantize.pytorch")
    reference = load(archive, f"{packages[-1]}.reference", *packages)
    return reference, load(archive, "fouroversix.utils", "fouroversix")


def fouroversix_nvfp4(x: torch.Tensor, rule: str) -> Result:
    """rule: `mse`, `mae` or `static_6`."""
    reference, _ = _fouroversix()
    rules = reference.ScaleRule
    codes, scales, amax = reference.quantize_to_fp4(
        x, scale_rule=rules(rule), use_blackwell_scale_layout=False
    )
    return of_tensors(codes, scales.view(len(x), -1), amax)


@cache
def _modelopt() -> ModuleType:
    archive = wheel("nvidia_modelopt")
    root = "modelopt.torch.quantization"
    amax = functions(
        archived_source(archive, "modelopt/torch/quantization/utils/core_utils.py"),
        ("reduce_amax", "reduce_block_amax", "reduce_block_padding"),
        torch=torch,
        F=torch.nn.functional,
        _FP8_DTYPES=(),
    )
    packages = ("modelopt", "modelopt.torch", root, f"{root}.qtensor", f"{root}.backends", f"{root}.utils")
    missing = dict.fromkeys(("fsdp2_aware_weight_update", "patch_fsdp_mp_dtypes"))
    return load(archive, f"{root}.qtensor.nvfp4_tensor", *packages, **amax, **missing)


def modelopt_nvfp4(x: torch.Tensor) -> Result:
    tensor, scales, g = _modelopt().NVFP4QTensor.quantize(x.clone(), 16)
    return of_tensors(tensor._quantized_data, scales, g)

"""Execution specifications with a name, each with the software that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kernels.catalogue_quantizers import (
    COMPRESSED_TENSORS,
    FLASHINFER_EXACT,
    FLASHINFER_FAST,
    FOUR_OVER_SIX,
    FP8,
    MODELOPT,
    MSLK,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    NVFP4,
    TE,
    TE_FAST_MATH,
    TORCHAO,
    VLLM_CUDA,
    VLLM_EMULATION,
    Values,
)
from kernels.fields import PlainValue
from kernels.spec import PARTS, QUANTIZERS, ExecutionSpec

_NO_OVERRIDES: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Source:
    """Where a spec comes from: which release, with which settings, computes it, and where that is written."""

    library: str
    version: str
    settings: str = ""
    reference: str = ""


@dataclass(frozen=True)
class Entry:
    values: Values  # plain form, without `name`
    source: Source


# Layers.

_LAYER: Values = {
    "operand": "bf16",
    "accumulation": "fp32_any_order",
    "epilogue": "acc*(gx*gw)",
    "fc1_output": "bf16",
    "swiglu": "fp32(silu(gate))*up",
    "swiglu_output": "bf16",
    "fc2_output": "bf16",
    "router_position": "fc2_output",
    "router_coefficient": "fp32",
    "router_product": "fp32",
    "combine": "slot_order",
    "combine_sum": "fp32",
    "output": "bf16",
    "backward": "bf16_straight_through",
}
_NO_OUTER = {**_LAYER, "epilogue": "none"}
_FP32 = {
    **_NO_OUTER,
    "operand": "fp32",
    "accumulation": "fp32_gemm",
    "fc1_output": "fp32",
    "swiglu": "library_silu(gate)*up",
    "swiglu_output": "fp32",
    "fc2_output": "fp32",
    "output": "fp32",
    "backward": "fp32",
}
# Megatron-core multiplies the activation with the router's probability ahead of FC2.
_MEGATRON = {**_LAYER, "router_position": "swiglu_output", "router_product": "bf16"}
# vLLM's CUTLASS experts: BF16 coefficient and product, then torch.sum over the top-k.
_VLLM_LAYER = {
    **_LAYER,
    "router_coefficient": "bf16",
    "router_product": "bf16",
    "combine": "any_order",
}
# Atomic additions of BF16 terms to a BF16 sum.
_FLASHINFER_LAYER = {**_LAYER, "router_product": "bf16", "combine": "any_order", "combine_sum": "bf16"}
_FLASHINFER_DETERMINISTIC = {**_LAYER, "combine": "slot_order_fma"}


def _spec(
    layer: Values,
    activation: Values | None = None,
    weight: Values | None = None,
    gradient: Values | None = None,
) -> Values:
    """The plain form of a spec from its parts."""
    plain: dict[str, PlainValue] = {}
    for role, quantizer in zip(QUANTIZERS, (activation, weight, gradient), strict=True):
        if quantizer is None:
            plain[role] = "none"
        else:
            plain |= {f"{role}.{key}": value for key, value in quantizer.items()}
    return MappingProxyType(plain | dict(layer))


def _over(quantizer: Values, domain: str, **changes: PlainValue) -> Values:
    return {**quantizer, "outer_domain": domain, **changes}


def _nvfp4(
    quantizer: Values, layer: Values, activation: str, weight: str, gradient: Values | None = None
) -> Values:
    return _spec(layer, _over(quantizer, activation), _over(quantizer, weight), gradient)


_AMAX_ALPHA = {**_MEGATRON, "epilogue": "acc*((Ax*Aw)*(1/(Mx*Mw)))"}
_TE_GRADIENT = {**_over(TE, "tensor"), "rounding": "stochastic", "transform": "hadamard_16"}
_TE_RECIPE = {**_AMAX_ALPHA, "backward": "quantized"}
_MXFP8_BACKWARD = {**_LAYER, "backward": "quantized"}
_MINITE = _nvfp4(NVFP4, _LAYER, "token", "row")

_STRICT_MODEL: Values = {
    "model.linear": "exact_fixed_point",
    "model.attention": "exact_fixed_point",
    "model.norm": "fp32_halves",
    "model.rotary": "fp32",
    "model.router": "fp32_halves",
    "model.log_softmax": "fp32_halves",
}

_TE_LIBRARY = ("Transformer Engine", "2.20.2")
_TE_CODE = "transformer_engine/common/cast/nvfp4/core_nvfp4.cuh"
_NO_RANDOM = (
    "NVTE_NVFP4_DISABLE_RHT=1 NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1 NVTE_NVFP4_DISABLE_2D_QUANTIZATION=1"
)
_HIGH_PRECISION = f"{_NO_RANDOM} NVTE_BACKWARD_OVERRIDE=high_precision"
_FLASHINFER_CODE = "csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh"
_OCP = "OCP Microscaling Formats (MX) v1.0"

CATALOGUE: Mapping[str, Entry] = MappingProxyType(
    {
        "minite": Entry(_MINITE, Source("miniTE", "0.1")),
        "minite_expert": Entry(
            _nvfp4(NVFP4, _LAYER, "token", "expert"),
            Source("miniTE", "0.1", "weight outer scales that stock samplers can take"),
        ),
        "strict": Entry(
            MappingProxyType({**_MINITE, **_STRICT_MODEL}),
            Source("miniTE", "0.1", "minite, and the rest of the model to the bit"),
        ),
        "minite_mxfp8_backward": Entry(
            _spec(_MXFP8_BACKWARD, _over(NVFP4, "token"), _over(NVFP4, "row"), MXFP8),
            Source("miniTE", "0.1", "minite with the gradient's products in MXFP8"),
        ),
        "te_per_tensor": Entry(
            _nvfp4(TE, _TE_RECIPE, "tensor", "expert", _TE_GRADIENT),
            Source(*_TE_LIBRARY, "NVTE_NVFP4_DISABLE_2D_QUANTIZATION=1", _TE_CODE),
        ),
        "te_per_tensor_2d": Entry(
            _spec(_TE_RECIPE, _over(TE, "tensor"), _over(TE, "expert", block="16x16"), _TE_GRADIENT),
            Source(*_TE_LIBRARY, "NVFP4BlockScaling, but dgrad takes the weight in 1x16 blocks", _TE_CODE),
        ),
        "te_exact": Entry(
            _nvfp4(TE, _AMAX_ALPHA, "tensor", "expert"), Source(*_TE_LIBRARY, _HIGH_PRECISION, _TE_CODE)
        ),
        "te_per_token": Entry(
            _nvfp4(TE, {**_MEGATRON, "epilogue": "(acc*(1/(Mx*Mw)))*(Ax*Aw)"}, "token", "expert"),
            Source(*_TE_LIBRARY, f"{_HIGH_PRECISION} NVTE_NVFP4_ROW_SCALED_ACTIVATION=1", _TE_CODE),
        ),
        "te_fast_math": Entry(
            _nvfp4(TE_FAST_MATH, _AMAX_ALPHA, "tensor", "expert"),
            Source(
                *_TE_LIBRARY,
                f"{_HIGH_PRECISION} NVTE_USE_FAST_MATH=1",
                "transformer_engine/common/cast/nvfp4/specialized/quantize_transpose_nvfp4_tuned_1D.cuh",
            ),
        ),
        "flashinfer_exact": Entry(
            _nvfp4(FLASHINFER_EXACT, _FLASHINFER_DETERMINISTIC, "token", "expert"),
            Source(
                "FlashInfer",
                "0.7.4",
                "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1, unfused finalize",
                _FLASHINFER_CODE,
            ),
        ),
        "flashinfer_fast_0_7_2": Entry(
            _nvfp4(FLASHINFER_FAST, _FLASHINFER_LAYER, "token", "expert"),
            Source("FlashInfer", "up to 0.7.2.post1", "", _FLASHINFER_CODE),
        ),
        "flashinfer_fast_0_7_4": Entry(
            _nvfp4(
                {**FLASHINFER_FAST, "underflow_codes": "s=0:factor=0"}, _FLASHINFER_LAYER, "token", "expert"
            ),
            Source("FlashInfer", "from 0.7.4", "", _FLASHINFER_CODE),
        ),
        "vllm_cuda": Entry(
            _nvfp4(VLLM_CUDA, _VLLM_LAYER, "tensor", "expert"),
            Source(
                "vLLM",
                "0.33.0",
                "CUTLASS FP4 experts",
                "csrc/libtorch_stable/quantization/fp4/nvfp4_utils.cuh",
            ),
        ),
        "vllm_emulation": Entry(
            _nvfp4(VLLM_EMULATION, _VLLM_LAYER, "tensor", "expert"),
            Source(
                "vLLM",
                "0.32.0",
                "Triton emulation, with correctly rounded division",
                "vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py",
            ),
        ),
        "torchao": Entry(
            _nvfp4(TORCHAO, _LAYER, "tensor", "expert"),
            Source(
                "torchao", "0.18.0", "NVFP4Tensor, on a CPU", "torchao/prototype/mx_formats/nvfp4_tensor.py"
            ),
        ),
        "mslk": Entry(
            _nvfp4(MSLK, {**_LAYER, "epilogue": "(acc*gx)*gw"}, "token", "expert"),
            Source("MSLK", "2a3c897 (2026-08-21)", "precise math", "mslk/quantize/triton/fp4_quantize.py"),
        ),
        "modelopt": Entry(
            _nvfp4(MODELOPT, _LAYER, "tensor", "expert"),
            Source(
                "TensorRT Model Optimizer",
                "0.47.0",
                "on a CPU",
                "modelopt/torch/quantization/qtensor/nvfp4_tensor.py",
            ),
        ),
        "compressed_tensors": Entry(
            _nvfp4(COMPRESSED_TENSORS, _LAYER, "tensor", "expert"),
            Source(
                "compressed-tensors",
                "0.17.0",
                "on a CPU, from FP32 minima and maxima",
                "compressed_tensors/quantization/utils/helpers.py",
            ),
        ),
        "four_over_six": Entry(
            _nvfp4(FOUR_OVER_SIX, _LAYER, "tensor", "expert"),
            Source("fouroversix", "1.0.5", "mse", "fouroversix/quantize/pytorch/reference.py"),
        ),
        "four_over_six_mae": Entry(
            _nvfp4({**FOUR_OVER_SIX, "selector": "4over6_mae"}, _LAYER, "tensor", "expert"),
            Source("fouroversix", "1.0.5", "mae", "fouroversix/quantize/pytorch/reference.py"),
        ),
        "mxfp4": Entry(_spec(_NO_OUTER, MXFP4, MXFP4), Source(_OCP, "floor")),
        "mxfp8": Entry(_spec(_NO_OUTER, MXFP8, MXFP8), Source(_OCP, "scales rounded up")),
        "mxfp6_e2m3": Entry(_spec(_NO_OUTER, MXFP6_E2M3, MXFP6_E2M3), Source(_OCP, "floor")),
        "mxfp6_e3m2": Entry(_spec(_NO_OUTER, MXFP6_E3M2, MXFP6_E3M2), Source(_OCP, "floor")),
        "fp8_per_token": Entry(
            _spec(_LAYER, _over(FP8, "token"), _over(FP8, "row")), Source("miniTE", "0.1", "E4M3, A/448")
        ),
        "bf16": Entry(_spec(_NO_OUTER), Source("miniTE", "0.1")),
        "fp32": Entry(
            _spec(_FP32),
            Source("miniTE", "0.1", "for comparison with other implementations, not for training"),
        ),
    }
)


def named_spec(name: str, overrides: Mapping[str, object] = _NO_OVERRIDES) -> ExecutionSpec:
    """The spec called `name`, with the fields in `overrides` replaced.

    A field of a quantiser has a dotted name (`weight.outer_domain`) or stands in a nested mapping; a quantiser is
    left out with the value "none". Raises ValueError for an unknown name, field or value, and for fields that then
    contradict each other.
    """
    if name not in CATALOGUE:
        raise ValueError(f"no execution spec is called {name!r}; there are: {', '.join(CATALOGUE)}")
    flat = _flatten(overrides)
    if "name" in flat:
        raise ValueError("the name of an execution spec follows from its overrides and cannot be overridden")
    label = name
    if flat:
        label += "[" + ",".join(f"{key}={value}" for key, value in sorted(flat.items())) + "]"
    dropped = tuple(f"{role}." for role in PARTS if flat.get(role) == "none")
    kept = {key: value for key, value in CATALOGUE[name].values.items() if not key.startswith(dropped)}
    return ExecutionSpec.from_dict({**kept, **flat, "name": label})


def _flatten(overrides: Mapping[str, object]) -> dict[str, object]:
    """{"weight": {"outer_domain": x}} -> {"weight.outer_domain": x}."""
    flat: dict[str, object] = {}
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": leaf for inner, leaf in value.items()}
        else:
            flat[key] = value
    return flat

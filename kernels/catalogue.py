"""Execution specifications with a name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kernels.spec import (
    Accumulation,
    ActivationScaleDomain,
    Backward,
    BlockScale,
    BlockScaleFormat,
    BlockUnderflow,
    Combine,
    Element,
    Epilogue,
    ExecutionSpec,
    FloatType,
    Format,
    NegativeZero,
    NibbleOrder,
    OuterScale,
    RouterPosition,
    ScaleLayout,
    Swiglu,
    WeightScaleDomain,
    ZeroGroup,
)

_NO_OVERRIDES: Mapping[str, object] = MappingProxyType({})

_MINITE: dict[str, object] = {
    "format": Format.NVFP4,
    "operand": FloatType.BF16,
    "block_size": 16,
    "block_scale_format": BlockScaleFormat.E4M3,
    "activation_scale_domain": ActivationScaleDomain.TOKEN,
    "weight_scale_domain": WeightScaleDomain.ROW,
    "outer_scale": OuterScale.DECODE_AMAX_DIV_2688,
    "zero_group": ZeroGroup.UNIT_SCALE_BELOW_2POW_MINUS_100,
    "block_scale": BlockScale.A_DIV_6G,
    "block_underflow": BlockUnderflow.ZERO_CODES,
    "element": Element.X_DIV_SG,
    "negative_zero": NegativeZero.KEEP,
    "accumulation": Accumulation.FP32_ANY_ORDER,
    "epilogue": Epilogue.OUTER_PRODUCT_FIRST,
    "fc1_output": FloatType.BF16,
    "swiglu": Swiglu.FP32_ROUNDED_SILU,
    "swiglu_output": FloatType.BF16,
    "fc2_output": FloatType.BF16,
    "router_position": RouterPosition.FC2_OUTPUT,
    "router_product": FloatType.FP32,
    "combine": Combine.SLOT_ORDER,
    "combine_sum": FloatType.FP32,
    "output": FloatType.BF16,
    "nibble_order": NibbleOrder.EVEN_LOW,
    "scale_layout": ScaleLayout.LINEAR,
    "backward": Backward.BF16_STRAIGHT_THROUGH,
}
_BF16 = _MINITE | {
    "format": Format.BF16,
    "block_size": 0,
    "block_scale_format": BlockScaleFormat.NONE,
    "activation_scale_domain": ActivationScaleDomain.NONE,
    "weight_scale_domain": WeightScaleDomain.NONE,
    "outer_scale": OuterScale.NONE,
    "zero_group": ZeroGroup.NONE,
    "block_scale": BlockScale.NONE,
    "block_underflow": BlockUnderflow.NONE,
    "element": Element.NONE,
    "negative_zero": NegativeZero.NONE,
    "epilogue": Epilogue.NONE,
    "nibble_order": NibbleOrder.NONE,
    "scale_layout": ScaleLayout.NONE,
}
_FP32 = _BF16 | {
    "format": Format.FP32,
    "operand": FloatType.FP32,
    "accumulation": Accumulation.FP32_GEMM,
    "fc1_output": FloatType.FP32,
    "swiglu": Swiglu.FP32_LIBRARY_SILU,
    "swiglu_output": FloatType.FP32,
    "fc2_output": FloatType.FP32,
    "output": FloatType.FP32,
    "backward": Backward.FP32,
}

CATALOGUE: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "minite": _MINITE,  # per-token activation and per-row weight outer scales
        "minite_expert": _MINITE | {"weight_scale_domain": WeightScaleDomain.EXPERT},
        "bf16": _BF16,
        "fp32": _FP32,  # for comparison with other implementations, not for training
    }
)


def named_spec(name: str, overrides: Mapping[str, object] = _NO_OVERRIDES) -> ExecutionSpec:
    """The spec called `name`, with the fields in `overrides` (plain values or enum members) replaced.

    Raises ValueError for an unknown name, field or value, and for fields that then contradict each other.
    """
    if name not in CATALOGUE:
        raise ValueError(f"no execution spec is called {name!r}; there are: {', '.join(CATALOGUE)}")
    if "name" in overrides:
        raise ValueError("the name of an execution spec follows from its overrides and cannot be overridden")
    label = name
    if overrides:
        label += "[" + ",".join(f"{key}={value}" for key, value in sorted(overrides.items())) + "]"
    return ExecutionSpec.from_dict({**CATALOGUE[name], **overrides, "name": label})

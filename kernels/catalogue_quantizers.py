"""The quantisers of the catalogue in plain form. Where there are outer scales, a spec adds their `outer_domain`."""

from __future__ import annotations

from collections.abc import Mapping

from kernels.fields import PlainValue

Values = Mapping[str, PlainValue]

# E2M1 elements, a block scale for 16 of them in E4M3, FP32 outer scales, unless they say otherwise.

NVFP4: Values = {
    "element": "e2m1",
    "block": "1x16",
    "block_scale_format": "e4m3",
    "block_scale_max": 448,
    "outer_scale": "g=A/M,S=1/g",
    "outer_stored": "g",
    "zero_group": "A<2^-100:g=1",
    "block_scale": "a/(E*g)",
    "block_scale_floor": "none",
    "zero_block": "computed",
    "quotient": "x/(s*g)",
    "underflow_codes": "s=0:codes=0",
    "selector": "E",
    "rounding": "nearest_even",
    "non_finite": "refuse",
    "negative_zero": "keep",
    "transform": "none",
    "code_layout": "even_low",
    "scale_layout": "linear",
}
TE = {
    **NVFP4,
    "outer_scale": "S=M/A,g=1/S",
    "outer_stored": "A",
    "zero_group": "A=0:S=1",
    "block_scale": "a*(S*(1/E))",
    "quotient": "x*(1/(s*(1/S)))",
    "underflow_codes": "computed",
    "non_finite": "saturate",
    "scale_layout": "swizzled_128x4",
}
# The product is an FMA that adds +0 (`fma.rn.f32.bf16`).
TE_FAST_MATH = {**TE, "quotient": "x*bf16(S/s)", "negative_zero": "positive"}
FLASHINFER_EXACT = {**TE, "outer_stored": "g", "zero_group": "A=0:S=max"}
FLASHINFER_FAST = {
    **FLASHINFER_EXACT,
    "outer_scale": "g=A*(1/M),S=rcp~(g)",
    "zero_group": "g=0:S=0",
    "block_scale": "(a*rcp~(E))*S",
    "quotient": "x*rcp~(s*rcp~(S))",
    "underflow_codes": "a=0:factor=0",
}
VLLM_CUDA = {
    **FLASHINFER_FAST,
    "outer_scale": "S=(1/A)*M,g=1/S",
    "zero_group": "A>=1e-8",
    "underflow_codes": "s=0:factor=0",
}
VLLM_EMULATION = {
    **VLLM_CUDA,
    "block_scale": "(a*(1/E))*S",
    "quotient": "x*(S/s)",
    "negative_zero": "positive",
    "scale_layout": "linear",
}
# Libraries in PyTorch, on a CPU. On a GPU, PyTorch multiplies a tensor with the reciprocal of a number by which it
# is to be divided: a*(1/E) for a/E, A*(1/M) for A/M.
TORCHAO = {
    **NVFP4,
    "zero_group": "computed",
    "block_scale": "(a/E)/g",
    "block_scale_floor": "2^-6",
    "quotient": "x*((1/g)/s)",
    "underflow_codes": "computed",
    "non_finite": "propagate",
}
MSLK = {
    **NVFP4,
    "zero_group": "A>=1e-8",
    "block_scale": "(a/E)*S",
    "block_scale_floor": "2^-9",
    "quotient": "x*(S/s)",
    "underflow_codes": "computed",
    "non_finite": "saturate",
    "scale_layout": "swizzled_128x4",
}
MODELOPT = {
    **NVFP4,
    "zero_group": "computed",
    "block_scale_floor": "2^-9",
    "zero_block": "a=0:s=1",
    "underflow_codes": "computed",
    "non_finite": "propagate",
    "negative_zero": "positive",
}
COMPRESSED_TENSORS = {
    **NVFP4,
    "outer_scale": "S=(1/A)*M,g=1/S",
    "outer_stored": "S",
    "zero_group": "S=inf:S=1",
    "block_scale": "(a/E)*S",
    "zero_block": "s=0:s=1/8",
    "quotient": "x/(s/S)",
    "underflow_codes": "computed",
    "non_finite": "propagate",
    "negative_zero": "positive",
}
FOUR_OVER_SIX = {
    **TE,
    "block_scale_max": 256,
    "block_scale": "(a/E)*S",
    "underflow_codes": "s=0:codes=0",
    "selector": "4over6_mse",
    "non_finite": "propagate",
    "negative_zero": "positive",
    "scale_layout": "linear",
}

# Other formats.

MXFP4 = {
    **NVFP4,
    "block": "1x32",
    "block_scale_format": "e8m0",
    "block_scale_max": 0,
    "outer_domain": "none",
    "outer_scale": "none",
    "outer_stored": "none",
    "zero_group": "none",
    "block_scale": "2^(floor(log2(a))-floor(log2(E)))",
    "quotient": "x/s",
    "underflow_codes": "computed",
}
MXFP8 = {**MXFP4, "element": "e4m3", "block_scale": "2^ceil(log2(a/E))", "code_layout": "byte"}
MXFP6_E2M3 = {**MXFP4, "element": "e2m3", "code_layout": "byte"}
MXFP6_E3M2 = {**MXFP4, "element": "e3m2", "code_layout": "byte"}
FP8 = {
    **NVFP4,
    "element": "e4m3",
    "block": "none",
    "block_scale_format": "none",
    "block_scale_max": 0,
    "zero_group": "A=0:g=1",
    "block_scale": "none",
    "zero_block": "none",
    "quotient": "x/g",
    "underflow_codes": "none",
    "code_layout": "byte",
    "scale_layout": "none",
}

"""Catalogued quantisers against the code of the libraries that they are named after, bit for bit.

Two levels: bytes (outer scales, block scales, codes) and decoded values. Libraries that are not installed are
loaded from wheels (`oracles.loading`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles import inputs, libraries, wheels
from oracles.inputs import DRAWS, Draw
from oracles.result import Result, assert_same_bytes, assert_same_values, of_quantized, ours
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.utils import to_blocked

from kernels import codec_e4m3
from kernels.catalogue import named_spec
from kernels.quantize import QuantizedTensor, dequantize, quantize_activation, quantize_weight
from kernels.quantizer_spec import QuantizerSpec
from kernels.scales import outer_scales
from kernels.swizzle import swizzle_128x4

BY_BYTE = codec_e4m3.decode(torch.arange(256, dtype=torch.uint8)).double().numpy()
Library = Callable[[torch.Tensor], Result]
TENSOR_SCALED: dict[str, Library] = {
    "torchao": libraries.torchao_nvfp4,
    "compressed_tensors": libraries.compressed_tensors_nvfp4,
    "modelopt": wheels.modelopt_nvfp4,
}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
ALL_DRAWS = pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)


def activation_of(name: str) -> QuantizerSpec:
    spec = named_spec(name).activation
    assert spec is not None
    return spec


def weight_of(name: str) -> QuantizerSpec:
    spec = named_spec(name).weight
    assert spec is not None
    return spec


def drawn(draw: Draw, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    limit = torch.finfo(torch.bfloat16).max
    return draw().clamp(-limit, limit).to(dtype)


def is_nan(scales: np.ndarray) -> np.ndarray:
    return (scales & 0x7F) == 0x7F


def assert_same_scales(actual: Result, expected: Result) -> None:
    """Outer and block scales, NaN of either sign being one."""
    np.testing.assert_array_equal(actual.outer, expected.outer)
    np.testing.assert_array_equal(is_nan(actual.scales), is_nan(expected.scales))
    numbers = ~is_nan(expected.scales)
    np.testing.assert_array_equal(actual.scales[numbers], expected.scales[numbers])


@DTYPES
@ALL_DRAWS
@pytest.mark.parametrize("name", TENSOR_SCALED)
def test_tensor_scaled_activations(name: str, draw: Draw, dtype: torch.dtype) -> None:
    x = drawn(draw, dtype)
    actual, expected = ours(x, activation_of(name)), TENSOR_SCALED[name](x)
    assert_same_bytes(actual, expected)
    assert_same_values(actual, expected, BY_BYTE)


@pytest.mark.parametrize("name", TENSOR_SCALED)
def test_weights_expert_by_expert(name: str) -> None:
    weight = torch.stack([drawn(draw, torch.bfloat16) for draw in (inputs.gaussian, inputs.heavy_tailed)])
    quantized = quantize_weight(weight, weight_of(name))
    for e in range(len(weight)):
        assert_same_bytes(expert(quantized, e, weight_of(name)), TENSOR_SCALED[name](weight[e]))


def expert(quantized: QuantizedTensor, e: int, spec: QuantizerSpec) -> Result:
    assert quantized.block_scales is not None and quantized.outer_scales is not None
    one = QuantizedTensor(quantized.codes[e], quantized.block_scales[e], quantized.outer_scales[e])
    return of_quantized(one, spec)


@pytest.mark.parametrize("name", TENSOR_SCALED)
def test_a_tensor_of_zeros(name: str) -> None:
    """torchao and Model Optimizer divide zero by zero there: every value decodes to NaN, and codes mean nothing."""
    x = inputs.all_zero()
    actual, expected = ours(x, activation_of(name)), TENSOR_SCALED[name](x)
    assert_same_scales(actual, expected)
    assert (is_nan(expected.scales).all()) is np.bool_(name != "compressed_tensors")
    if name == "compressed_tensors":
        assert_same_bytes(actual, expected)


@pytest.mark.parametrize("name", TENSOR_SCALED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_values_that_are_not_finite_reach_the_scales(name: str, value: float) -> None:
    x = drawn(inputs.gaussian, torch.bfloat16)
    x[2, 40] = value
    actual, expected = ours(x, activation_of(name)), TENSOR_SCALED[name](x)
    assert_same_scales(actual, expected)
    assert is_nan(expected.scales).any()


@DTYPES
@ALL_DRAWS
@pytest.mark.parametrize(("name", "rule"), [("four_over_six", "mse"), ("four_over_six_mae", "mae")])
def test_four_over_six(name: str, rule: str, draw: Draw, dtype: torch.dtype) -> None:
    """But for blocks in which fouroversix does not saturate: it has quotients beyond 7 coded as minus zero, where a
    subnormal block scale is rounded far down."""
    x = drawn(draw, dtype)
    actual, expected = ours(x, activation_of(name)), wheels.fouroversix_nvfp4(x, rule)
    blocks = x.double().abs().view(len(x), -1, 16).amax(-1).numpy()
    saturates = (blocks > 0) & (blocks / blocks.max() * 256 < 2.0**-6)
    assert saturates.mean() < 0.95
    np.testing.assert_array_equal(actual.outer, expected.outer)
    np.testing.assert_array_equal(actual.scales[~saturates], expected.scales[~saturates])
    elements = ~saturates.repeat(16, 1)
    np.testing.assert_array_equal(actual.codes[elements], expected.codes[elements])
    if draw is inputs.gaussian:
        sixes = wheels.fouroversix_nvfp4(x, "static_6")
        assert (sixes.scales != expected.scales).mean() > 0.3  # the selector has work to do


@ALL_DRAWS
def test_flashinfer_per_token(draw: Draw) -> None:
    x = drawn(draw, torch.bfloat16)
    actual, expected = ours(x, activation_of("flashinfer_exact")), wheels.flashinfer_nvfp4(x, per_token=True)
    assert_same_bytes(actual, expected)
    assert_same_values(actual, expected, BY_BYTE)


def test_flashinfer_in_exact_fractions() -> None:
    x = torch.cat([drawn(draw, torch.bfloat16)[5:7, :64] for draw in (inputs.subnormal_scales, inputs.zeros)])
    x[0, 0] = 300.0
    expected = wheels.flashinfer_exact_rows(x, list(range(len(x))))
    assert_same_bytes(ours(x, activation_of("flashinfer_exact")), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_flashinfer_hides_values_that_are_not_finite(value: float) -> None:
    x = drawn(inputs.gaussian, torch.bfloat16)
    x[2, 40] = value
    x[3, 16:32] = torch.nan
    x[3, 1] = value
    actual, expected = ours(x, activation_of("flashinfer_exact")), wheels.flashinfer_nvfp4(x, per_token=True)
    assert np.isfinite(actual.outer).all() and (actual.scales != 0x7F).all()
    rows = (
        ~x.isnan().view(len(x), -1, 16).all(-1).any(-1).numpy()
    )  # the library leaves NaN a block of NaN alone
    np.testing.assert_array_equal(actual.outer, expected.outer)
    assert_same_bytes(actual.rows(rows), expected.rows(rows))


@ALL_DRAWS
@pytest.mark.parametrize("name", ["te_exact", "te_per_token"])
def test_transformer_engine_has_flashinfers_quantiser(name: str, draw: Draw) -> None:
    """FlashInfer's class is that of Transformer Engine; what is stored differs: A, not g."""
    x = drawn(draw, torch.bfloat16)
    spec = activation_of(name)
    per_token = name == "te_per_token"
    actual, expected = ours(x, spec), wheels.flashinfer_nvfp4(x, per_token=per_token)
    assert_same_bytes(Result(actual.codes, actual.scales), expected)
    amax = x.float().abs().amax(-1) if per_token else x.float().abs().max().view(1)
    np.testing.assert_array_equal(actual.outer, amax.numpy())


@ALL_DRAWS
def test_vllm_triton_emulation(draw: Draw) -> None:
    """The kernel's text, run on the CPU, against codes times (s/S)."""
    x = drawn(draw, torch.bfloat16).float()
    spec = activation_of("vllm_emulation")
    encode = outer_scales(x.abs().max().view(1, 1), spec).encode
    expected = libraries.vllm_triton(x, encode)
    quantized = ours(x, spec)
    step = (torch.from_numpy(BY_BYTE[quantized.scales]).float() / encode).repeat_interleave(16, dim=1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    actual = values[torch.from_numpy(quantized.codes).long()] * step
    np.testing.assert_array_equal(actual.numpy().view(np.uint32), expected.view(np.uint32))


@DTYPES
@ALL_DRAWS
def test_vllm_emulation_without_a_gpu(draw: Draw, dtype: torch.dtype) -> None:
    """The same library elsewhere multiplies with a reciprocal of a reciprocal."""
    x = drawn(draw, dtype)
    spec = named_spec("vllm_emulation", {"activation.quotient": "x*(1/(s*(1/S)))"}).activation
    assert spec is not None
    encode = outer_scales(x.float().abs().max().view(1, 1), spec).encode
    actual, expected = ours(x, spec), libraries.vllm_reference(x, encode)
    np.testing.assert_array_equal(actual.scales, expected.scales)
    coded = (expected.scales != 0).repeat(16, 1)  # where s = 0 the library multiplies with 1e-8
    np.testing.assert_array_equal(actual.codes[coded], expected.codes[coded])
    assert_same_values(actual, expected, BY_BYTE)


MX = {
    "mxfp4": (torch.float4_e2m1fn_x2, ScaleCalculationMode.FLOOR),
    "mxfp8": (torch.float8_e4m3fn, ScaleCalculationMode.RCEIL),
    "mxfp6_e2m3": (DTYPE_FP6_E2M3, ScaleCalculationMode.FLOOR),
    "mxfp6_e3m2": (DTYPE_FP6_E3M2, ScaleCalculationMode.FLOOR),
}


@ALL_DRAWS
@pytest.mark.parametrize("name", MX)
def test_microscaling_formats(name: str, draw: Draw) -> None:
    """BF16: torchao takes the logarithm in FP32, which next to a power of two may round to it."""
    x = drawn(draw, torch.bfloat16)
    assert_same_bytes(ours(x, activation_of(name)), libraries.torchao_mx(x, *MX[name]))


def test_fp8_per_token_equals_compressed_tensors() -> None:
    x = torch.cat([drawn(draw, torch.float32) for draw in (inputs.gaussian, inputs.large_rows)])
    quantized = quantize_activation(x, activation_of("fp8_per_token"))
    codes, scales = libraries.compressed_tensors_fp8(x)
    assert torch.equal(quantized.outer_scales, scales) and torch.equal(quantized.codes, codes)
    torch.testing.assert_close(
        dequantize(quantized, activation_of("fp8_per_token")), x, rtol=2**-4, atol=0.0, equal_nan=False
    )


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 3), (128, 4), (129, 5), (300, 16)])
def test_swizzling_equals_torchao_and_flashinfer(rows: int, columns: int) -> None:
    scales = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    swizzled = swizzle_128x4(scales)
    assert torch.equal(swizzled, to_blocked(scales).flatten())
    assert torch.equal(swizzled, wheels.flashinfer_swizzle(scales))

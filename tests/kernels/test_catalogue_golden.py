"""Catalogued quantisers whose libraries need a GPU: against their formulas in float64, and against hand work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from nvfp4_oracle import E4M3
from oracles import chains, inputs, libraries
from oracles.inputs import DRAWS, Draw
from oracles.loading import functions, installed_source
from oracles.result import Result, assert_same_bytes, assert_same_values, of_quantized, ours

from kernels.catalogue import CATALOGUE, named_spec
from kernels.quantize import QuantizedTensor, quantize_weight
from kernels.quantizer_spec import QuantizerSpec

CHAINS: dict[str, Callable[[np.ndarray], Result]] = {
    "te_per_tensor": chains.transformer_engine,
    "te_exact": chains.transformer_engine,
    "te_per_token": partial(chains.transformer_engine, per_row=True),
    "te_fast_math": chains.transformer_engine_fast_math,
    "flashinfer_fast_0_7_2": partial(chains.flashinfer_fast, guard_on_byte=False),
    "flashinfer_fast_0_7_4": partial(chains.flashinfer_fast, guard_on_byte=True),
    "vllm_cuda": chains.vllm_cuda,
    "mslk": chains.mslk,
}
BY_BYTE = np.concatenate([E4M3, [np.nan], E4M3, [np.nan]])


def activation_of(name: str) -> QuantizerSpec:
    spec = named_spec(name).activation
    assert spec is not None
    return spec


def drawn(draw: Draw) -> torch.Tensor:
    torch.manual_seed(1)
    limit = torch.finfo(torch.bfloat16).max
    return draw().clamp(-limit, limit).bfloat16()


@pytest.mark.parametrize("draw", [*DRAWS, inputs.all_zero], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("name", CHAINS)
def test_activations(name: str, draw: Draw) -> None:
    x = drawn(draw)
    actual, expected = ours(x, activation_of(name)), CHAINS[name](x.double().numpy())
    assert_same_bytes(actual, expected)
    assert_same_values(actual, expected, BY_BYTE)


@pytest.mark.parametrize("name", ["te_exact", "te_fast_math", "vllm_cuda"])
def test_weights_have_the_quantiser_of_a_tensor(name: str) -> None:
    spec = named_spec(name).weight
    assert spec is not None
    weight = torch.stack([drawn(inputs.gaussian), drawn(inputs.subnormal_scales)])
    quantized = quantize_weight(weight, spec)
    for e, matrix in enumerate(weight):
        assert_same_bytes(expert(quantized, e, spec), CHAINS[name](matrix.double().numpy()))


@pytest.mark.parametrize("draw", [inputs.gaussian, inputs.heavy_tailed, inputs.midpoint_dense])
def test_blocks_of_16_rows(draw: Draw) -> None:
    spec = named_spec("te_per_tensor_2d").weight
    assert spec is not None
    x = drawn(draw)
    quantized = quantize_weight(x[None], spec)
    expected = chains.transformer_engine(x.double().numpy(), tile=16)
    first_rows = Result(expected.codes, expected.scales[::16], expected.outer)
    assert_same_bytes(expert(quantized, 0, spec), first_rows)


def expert(quantized: QuantizedTensor, e: int, spec: QuantizerSpec) -> Result:
    assert quantized.block_scales is not None and quantized.outer_scales is not None
    one = QuantizedTensor(quantized.codes[e], quantized.block_scales[e], quantized.outer_scales[e])
    return of_quantized(one, spec)


def test_vllm_outer_scales_of_experts() -> None:
    """From the library's own function, with its kernel replaced by one that records S."""
    experts = [drawn(draw)[:8] for draw in (inputs.gaussian, inputs.midpoint_dense)]
    weight = torch.stack([*experts, torch.zeros_like(experts[0])])
    seen = []

    def record(expert: torch.Tensor, scale: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(scale)
        return expert, expert

    library = functions(
        installed_source("vllm.model_executor.layers.quantization.online.nvfp4"),
        ("_quantize_moe_weight_to_nvfp4",),
        torch=torch,
        FLOAT4_E2M1_MAX=6.0,
        FLOAT8_E4M3_MAX=448.0,
        weight_amax=lambda rows, dim: rows.abs().amax(dim),
        amax_for_moe_weight_quant=lambda amax, size: amax,
        scaled_fp4_quant=record,
    )
    spec = named_spec("vllm_cuda").weight
    assert spec is not None
    _, _, g = library["_quantize_moe_weight_to_nvfp4"](weight)
    quantized = quantize_weight(weight, spec)
    assert torch.equal(quantized.outer_scales[:, 0], g)
    assert torch.equal(1 / torch.stack(seen), g)


# One row of blocks with A = 2688, so that S = g = 1: an ordinary block, one whose scale rounds to zero, a zero block.
# By hand: 6/6 = 1 is byte 0x38; 2^-12/6 = 4.07e-5 is below 2^-10, half of E4M3's smallest number.
ORDINARY = [6.0, -6.0, 2.5, -0.2, 0.2, -0.0, 5.0, 3.5, 0.75, 1.75, 0.25, 1.25, -2.5, -3.5, 4.9, 5.1]
UNDERFLOW = [2.0**-12, -(2.0**-12), 2.0**-15, 0.0, -0.0] + [0.0] * 11
ZERO = [0.0, -0.0] + [0.0] * 14
KEEP_SIGN = [7, 15, 4, 8, 0, 8, 6, 6, 2, 4, 0, 2, 12, 14, 6, 7]
PLUS_ZERO = [7, 15, 4, 8, 0, 0, 6, 6, 2, 4, 0, 2, 12, 14, 6, 7]  # -0 becomes +0; -0.2 rounds to -0
BY_HAND = {
    # ordinary codes; scale byte and first codes of the underflow block; scale byte and first codes of the zero block
    "minite": (KEEP_SIGN, 0x00, [0, 0, 0, 0, 0], 0x00, [0, 0]),
    "te_exact": (KEEP_SIGN, 0x00, [7, 15, 7, 0, 8], 0x00, [0, 8]),  # x * FLT_MAX
    "te_fast_math": (PLUS_ZERO, 0x00, [7, 15, 7, 0, 0], 0x00, [0, 0]),  # x * 3.39e38
    "flashinfer_exact": (KEEP_SIGN, 0x00, [7, 15, 7, 0, 8], 0x00, [0, 8]),
    "flashinfer_fast_0_7_2": (KEEP_SIGN, 0x00, [7, 15, 7, 7, 7], 0x00, [0, 8]),  # x * Inf, and 0 * Inf = NaN
    "flashinfer_fast_0_7_4": (KEEP_SIGN, 0x00, [0, 8, 0, 0, 8], 0x00, [0, 8]),  # x * 0
    "vllm_cuda": (KEEP_SIGN, 0x00, [0, 8, 0, 0, 8], 0x00, [0, 8]),
    "vllm_emulation": (PLUS_ZERO, 0x00, [0, 0, 0, 0, 0], 0x00, [0, 0]),
    "torchao": (KEEP_SIGN, 0x08, [0, 8, 0, 0, 8], 0x08, [0, 8]),  # s = 2^-6: 2^-12 / 2^-6 = 1/64
    "mslk": (KEEP_SIGN, 0x01, [0, 8, 0, 0, 8], 0x01, [0, 8]),  # s = 2^-9: 2^-12 / 2^-9 = 1/8
    "modelopt": (PLUS_ZERO, 0x01, [0, 8, 0, 0, 0], 0x38, [0, 0]),  # s = 1 for zeros
    "compressed_tensors": (PLUS_ZERO, 0x20, [0, 8, 0, 0, 0], 0x20, [0, 0]),  # s = 1/8
}


@pytest.mark.parametrize("name", BY_HAND)
def test_blocks_worked_by_hand(name: str) -> None:
    x = torch.tensor([ORDINARY + UNDERFLOW + ZERO + [2688.0] + [0.0] * 15])
    codes, underflow_scale, underflow_codes, zero_scale, zero_codes = BY_HAND[name]
    actual = ours(x, activation_of(name))
    assert actual.scales.tolist() == [[0x38, underflow_scale, zero_scale, 0x7E]]
    assert actual.codes[0, :16].tolist() == codes
    assert actual.codes[0, 16:21].tolist() == underflow_codes
    assert actual.codes[0, 32:34].tolist() == zero_codes
    assert actual.outer.tolist() == [2688.0 if name.startswith("te") else 1.0]


# A row of zeros: the stored outer quantity.
ZERO_ROW = {
    "minite": 1.0,
    "te_exact": 0.0,  # A
    "flashinfer_exact": 1 / np.float32(chains.FP32_MAX),  # subnormal
    "flashinfer_fast_0_7_2": 0.0,
    "flashinfer_fast_0_7_4": 0.0,
    "vllm_cuda": np.float32(1) / ((np.float32(1) / np.float32(1e-8)) * np.float32(2688)),
    "mslk": np.float32(1e-8) / np.float32(2688),
    "torchao": 0.0,
    "compressed_tensors": 1.0,
    "fp8_per_token": 1.0,
}


@pytest.mark.parametrize("name", ZERO_ROW)
def test_outer_scales_of_zeros(name: str) -> None:
    actual = ours(torch.zeros(1, 32), activation_of(name))
    assert actual.outer.tolist() == [ZERO_ROW[name]]


def test_largest_codes_of_four_over_six_by_hand() -> None:
    """A = 1536, so that S = 1. Only s = 1 represents 6 and 4; only s = 1.5 represents 6 and 4.5, as 4 and 3."""
    x = torch.tensor([[1536.0] + [0.0] * 15 + [6.0, 4.0] + [0.0] * 14 + [6.0] + [4.5] * 15])
    for name in ("four_over_six", "four_over_six_mae"):
        actual = ours(x, activation_of(name))
        assert actual.scales.tolist() == [[0x78, 0x38, 0x3C]]  # 256, 1, 1.5
        assert actual.codes[0, 16:18].tolist() == [7, 6]
        assert actual.codes[0, 32:].tolist() == [6] + [5] * 15
        assert actual.outer.tolist() == [1536.0]


def test_errors_that_differ_select_differently() -> None:
    x = drawn(inputs.gaussian)
    squared, absolute = (ours(x, activation_of(name)) for name in ("four_over_six", "four_over_six_mae"))
    assert (squared.scales != absolute.scales).any() and (squared.scales == absolute.scales).mean() > 0.5


def test_fp8_scales_by_hand() -> None:
    x = torch.tensor([[448.0, -448.0, 1.0, -0.0, 2.0**-9, 2.0**-10, 0.0625, -17.0]])
    actual = ours(x, activation_of("fp8_per_token"))
    assert actual.outer.tolist() == [1.0] and actual.scales is None
    assert actual.codes.tolist() == [[0x7E, 0xFE, 0x38, 0x80, 0x01, 0x00, 0x18, 0xD8]]  # 17 ties to 16


@pytest.mark.parametrize(
    ("name", "largest", "scale", "code"),
    [
        ("mxfp4", 6.0, 127, 7),  # 2^(2-2)
        ("mxfp4", 7.9, 127, 7),  # saturates
        ("mxfp4", 8.0, 128, 6),
        ("mxfp8", 448.0, 127, 0x7E),
        ("mxfp8", 450.0, 128, 0x76),  # rounded up: 225 is coded as 224
        ("mxfp6_e2m3", 7.5, 127, 31),
        ("mxfp6_e2m3", 4.0, 127, 24),
        ("mxfp6_e3m2", 28.0, 127, 31),
        ("mxfp6_e3m2", 32.0, 128, 28),
    ],
)
def test_powers_of_two_by_hand(name: str, largest: float, scale: int, code: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 7] = largest
    actual = ours(x, activation_of(name))
    assert actual.scales.tolist() == [[scale]]
    assert actual.codes[0, 7] == code and not actual.codes[0, :7].any()


def test_every_catalogued_quantiser_is_compared_with_something() -> None:
    """Here, in test_catalogue_libraries or in test_quantize."""
    compared = {*CHAINS, *BY_HAND, "te_per_tensor_2d", "four_over_six", "four_over_six_mae", "fp8_per_token"}
    compared |= {"mxfp4", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2"}
    same = {"minite_expert": "minite", "minite_mxfp8_backward": "minite", "strict": "minite"}
    quantised = {name for name in CATALOGUE if named_spec(name).activation is not None}
    assert quantised - compared == set(same)
    for name, other in same.items():
        assert activation_of(name) == activation_of(other)


def test_the_emulation_kernel_is_not_the_reference_of_other_devices() -> None:
    """Third formula: vLLM's two emulations differ in codes, which is why the catalogue names the one on GPUs."""
    x = torch.randint(-24, 25, (64, 256), generator=torch.Generator().manual_seed(0)).float()
    x[0, 0] = 3072.0
    encode = (1 / x.abs().max()) * 2688
    elsewhere = libraries.vllm_reference(x, encode)
    assert (ours(x, activation_of("vllm_emulation")).codes != elsewhere.codes).any()


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("te_exact", "quotient", "x*(S/s)"),
        ("te_exact", "block_scale", "(a/E)*S"),
        ("te_fast_math", "quotient", "x*(1/(s*(1/S)))"),
        ("te_per_token", "outer_scale", "S=(1/A)*M,g=1/S"),
        ("flashinfer_fast_0_7_4", "outer_scale", "g=A/M,S=1/g"),
        ("flashinfer_fast_0_7_4", "underflow_codes", "a=0:factor=0"),
        ("vllm_cuda", "outer_scale", "S=M/A,g=1/S"),
        ("vllm_cuda", "block_scale", "a*(S*(1/E))"),
        ("mslk", "quotient", "x*(1/(s*(1/S)))"),
    ],
)
def test_the_inputs_tell_neighbouring_formulas_apart(name: str, field: str, value: str) -> None:
    spec = named_spec(name, {f"activation.{field}": value}).activation
    assert spec is not None
    for draw in DRAWS:
        x = drawn(draw)
        actual, expected = ours(x, spec), CHAINS[name](x.double().numpy())
        if (actual.codes != expected.codes).any() or (actual.scales != expected.scales).any():
            return
    pytest.fail(f"no input shows {field}={value} in the bytes")

"""The NVFP4 quantiser of `minite`, bit for bit against a second implementation and, where they coincide, torchao."""

from __future__ import annotations

import math

import numpy as np
import nvfp4_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

from kernels import codec_e4m3
from kernels.catalogue import named_spec
from kernels.packing import unpack
from kernels.quantize import QuantizedTensor, decode, dequantize, quantize_activation, quantize_weight
from kernels.quantizer_spec import QuantizerSpec


def activation_of(name: str, **overrides: object) -> QuantizerSpec:
    spec = named_spec(name, {"activation": overrides}).activation
    assert spec is not None
    return spec


def weight_of(name: str, **overrides: object) -> QuantizerSpec:
    spec = named_spec(name, {"weight": overrides}).weight
    assert spec is not None
    return spec


MINITE = activation_of("minite")
PER_TENSOR = activation_of("minite", outer_domain="tensor")
PER_ROW = weight_of("minite")
PER_EXPERT = weight_of("minite_expert")
PER_HALF = weight_of("minite", outer_domain="expert_half")


def gaussian(rows: int = 40, width: int = 96) -> torch.Tensor:
    return torch.randn(rows, width)


def heavy_tailed(rows: int = 60, width: int = 256) -> torch.Tensor:
    """Outliers, blocks and rows of very different size: block scales that are subnormal in E4M3, or zero."""
    student = torch.distributions.StudentT(1.0).sample((rows, width))
    block = torch.exp2(torch.randint(-24, 1, (rows, width // 16)).float()).repeat_interleave(16, dim=1)
    return student * block * torch.exp2(torch.randint(-40, 40, (rows, 1)).float())


def midpoint_dense(rows: int = 64, width: int = 256) -> torch.Tensor:
    """Small multiples of powers of two, whose quotients often fall on E4M3 and E2M1 ties."""
    integers = torch.randint(-24, 25, (rows, width)).float()
    integers[:, ::16] = 24.0  # a quotient of 6 or near it, so that the others are multiples of a quarter
    integers[:, 0] = 448 * 24.0
    return integers * torch.exp2(torch.randint(-4, 5, (rows, width // 16)).float()).repeat_interleave(
        16, dim=1
    )


def tiny(rows: int = 32, width: int = 64) -> torch.Tensor:
    """Around the threshold of a zero group, down into BF16's subnormal numbers."""
    return torch.randn(rows, width) * torch.exp2(torch.arange(-133, -133 + 2 * rows, 2).float())[:, None]


def huge(rows: int = 8, width: int = 64) -> torch.Tensor:
    return torch.rand(rows, width) * 3.3e38


DISTRIBUTIONS = [gaussian, heavy_tailed, midpoint_dense, tiny, huge]


def to_oracle(x: torch.Tensor) -> np.ndarray:
    return oracle.bf16(x.double().numpy())


def assert_same(actual: QuantizedTensor, expected: oracle.Quantized) -> None:
    assert actual.block_scales is not None and actual.outer_scales is not None
    np.testing.assert_array_equal(actual.block_scales.numpy(), expected.block_scales)
    np.testing.assert_array_equal(unpack(actual.codes).numpy(), expected.codes)
    np.testing.assert_array_equal(actual.outer_scales.double().numpy(), expected.outer_scales)
    np.testing.assert_array_equal(decode(actual, MINITE).double().numpy(), expected.decoded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("draw", DISTRIBUTIONS, ids=lambda draw: draw.__name__)
def test_per_token_activation_equals_the_oracle(draw, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = draw().to(dtype)
    assert_same(quantize_activation(x, MINITE), oracle.quantize(x.double().numpy()))


@pytest.mark.parametrize("draw", DISTRIBUTIONS, ids=lambda draw: draw.__name__)
def test_per_tensor_activation_equals_the_oracle(draw) -> None:
    torch.manual_seed(1)
    x = draw().bfloat16()
    actual = quantize_activation(x, PER_TENSOR)
    assert actual.outer_scales.shape == (1, 1)
    assert_same(actual, oracle.quantize(to_oracle(x), shared_scale=True))


@pytest.mark.parametrize("spec", [PER_ROW, PER_EXPERT], ids=lambda spec: spec.outer_domain)
@pytest.mark.parametrize("draw", DISTRIBUTIONS, ids=lambda draw: draw.__name__)
def test_weight_equals_the_oracle_expert_by_expert(draw, spec) -> None:
    torch.manual_seed(2)
    weight = torch.stack([draw(), draw(), torch.zeros_like(draw())]).bfloat16()
    actual = quantize_weight(weight, spec)
    assert actual.outer_scales is not None and actual.block_scales is not None
    shared = spec is PER_EXPERT
    assert actual.outer_scales.shape == (3, 1 if shared else weight.shape[1])
    for e in range(3):
        expert = QuantizedTensor(actual.codes[e], actual.block_scales[e], actual.outer_scales[e, :, None])
        assert_same(expert, oracle.quantize(to_oracle(weight[e]), shared))


@pytest.mark.parametrize("rows", [8, 40])
def test_gate_and_up_have_scales_of_their_own(rows: int) -> None:
    torch.manual_seed(7)
    weight = heavy_tailed(2 * rows).view(2, rows, -1).bfloat16()
    actual = quantize_weight(weight, PER_HALF, halves=True)
    gate, up = (quantize_weight(part, PER_EXPERT) for part in weight.chunk(2, dim=1))
    for name, dim in (("codes", 1), ("block_scales", 1), ("outer_scales", 1)):
        expected = torch.cat([getattr(gate, name), getattr(up, name)], dim)
        assert torch.equal(getattr(actual, name), expected)
    halves = torch.cat([dequantize(gate, PER_EXPERT), dequantize(up, PER_EXPERT)], 1)
    assert torch.equal(dequantize(actual, PER_HALF), halves)
    whole = quantize_weight(weight, PER_HALF)  # of a matrix that has no halves
    assert whole.outer_scales is not None and whole.outer_scales.shape == (2, 1)
    assert torch.equal(
        dequantize(whole, PER_HALF), dequantize(quantize_weight(weight, PER_EXPERT), PER_EXPERT)
    )


def test_the_draws_reach_the_cases_they_are_meant_for() -> None:
    torch.manual_seed(0)
    scales = codec_e4m3.decode(quantize_activation(heavy_tailed().bfloat16(), MINITE).block_scales)
    assert (scales == 0).any() and ((scales > 0) & (scales < 2**-6)).any() and (scales == 448).any()
    dense = midpoint_dense().bfloat16()
    quantized = quantize_activation(dense, MINITE)
    step = (codec_e4m3.decode(quantized.block_scales) * quantized.outer_scales).repeat_interleave(16, dim=1)
    ties = torch.isin((dense / step).abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    assert ties.float().mean() > 0.05
    zero_groups = quantize_activation(tiny().bfloat16(), MINITE).outer_scales == 1
    assert zero_groups.any() and not zero_groups.all()


def test_a_zero_row_has_unit_scale_and_zero_bytes() -> None:
    x = torch.randn(3, 32)
    x[1] = 0
    x[2] = math.ldexp(1.0, -101)
    quantized = quantize_activation(x, MINITE)
    for row in (1, 2):
        assert quantized.outer_scales[row] == 1
        assert not quantized.block_scales[row].any() and not quantized.codes[row].any()
    assert torch.isfinite(dequantize(quantized, MINITE)).all()


def test_the_threshold_of_a_zero_group_keeps_scales_normal() -> None:
    x = torch.full((1, 16), math.ldexp(1.0, -100))
    quantized = quantize_activation(x, MINITE)
    smallest_step = quantized.outer_scales.item() * 2.0**-9
    assert quantized.outer_scales.item() != 1 and smallest_step >= torch.finfo(torch.float32).tiny
    torch.testing.assert_close(dequantize(quantized, MINITE), x, rtol=0.07, atol=0)


def test_negative_zero_keeps_its_sign_except_in_a_zero_block() -> None:
    x = torch.ones(1, 48)
    x[0, 1] = -0.0
    x[0, 2] = -1e-3  # rounds to zero
    x[0, 16:32] = -0.0
    x[0, 32:] = -1e-7  # the block scale underflows
    codes = unpack(quantize_activation(x, MINITE).codes)[0]
    assert codes[:3].tolist() == [7, 8, 8]
    assert not codes[16:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_values_that_are_not_finite_are_refused(value: float, dtype: torch.dtype) -> None:
    x = torch.zeros(4, 32, dtype=dtype)
    x[2, 5] = x[3, 31] = value
    counts = "2 NaN and 0 infinite" if math.isnan(value) else "0 NaN and 2 infinite"
    with pytest.raises(ValueError, match=rf"activation \(4, 32\): {counts} values among 128"):
        quantize_activation(x, MINITE)
    with pytest.raises(ValueError, match="weight of expert 1"):
        quantize_weight(torch.stack([torch.zeros_like(x), x]), PER_ROW)


@pytest.mark.parametrize("width", [0, 8, 24, 100])
def test_rows_that_are_not_whole_blocks_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_activation(torch.zeros(2, width), MINITE)
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_weight(torch.zeros(1, 2, width), PER_ROW)


def test_rows_that_are_refused_are_reported_instead_where_that_is_asked_for() -> None:
    x = torch.zeros(4, 32)
    x[1, 5], x[3, 31] = math.nan, -math.inf
    reports: list[torch.Tensor] = []
    quantize_activation(x, MINITE, on_non_finite=reports.append)
    assert [report.tolist() for report in reports] == [[False, True, False, True]]


def test_wrong_ranks_and_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[R, K\]"):
        quantize_activation(torch.zeros(1, 2, 16), MINITE)
    with pytest.raises(ValueError, match=r"must be \[E, N, K\]"):
        quantize_weight(torch.zeros(2, 16), PER_ROW)
    with pytest.raises(ValueError, match=r"must be \[E, N, K\] with E >= 1"):
        quantize_weight(torch.zeros(0, 2, 16), PER_ROW)
    with pytest.raises(ValueError, match=r"bfloat16 or float32, got torch\.float16"):
        quantize_activation(torch.zeros(2, 16, dtype=torch.float16), MINITE)
    with pytest.raises(ValueError, match="seed=3"):
        quantize_activation(torch.zeros(2, 16), MINITE, seed=3)


def test_no_rows() -> None:
    for spec in (MINITE, PER_TENSOR):
        quantized = quantize_activation(torch.zeros(0, 32), spec)
        assert quantized.codes.shape == (0, 16) and quantized.block_scales.shape == (0, 2)
        assert dequantize(quantized, spec).shape == (0, 32)


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(3)
    x = heavy_tailed(rows=700)
    whole, row = quantize_activation(x, MINITE), quantize_activation(x[400:401], MINITE)
    for name in ("codes", "block_scales", "outer_scales"):
        assert torch.equal(getattr(whole, name)[400:401], getattr(row, name))


def test_input_that_is_not_contiguous() -> None:
    x = torch.randn(32, 64).bfloat16()
    assert torch.equal(quantize_activation(x.T, MINITE).codes, quantize_activation(x.T.clone(), MINITE).codes)


@settings(deadline=None, max_examples=50)
@given(exponent=st.integers(-60, 60), seed=st.integers(0, 2**31))
def test_a_power_of_two_moves_into_the_outer_scale(exponent: int, seed: int) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    plain, scaled = quantize_activation(x, MINITE), quantize_activation(x * 2.0**exponent, MINITE)
    assert torch.equal(plain.codes, scaled.codes) and torch.equal(plain.block_scales, scaled.block_scales)
    assert torch.equal(plain.outer_scales * 2.0**exponent, scaled.outer_scales)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 12).map(lambda n: 16 * n))
def test_negation_flips_signs_only(seed: int, width: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
    plain, negated = quantize_activation(x, MINITE), quantize_activation(-x, MINITE)
    assert torch.equal(unpack(plain.codes) ^ 8, unpack(negated.codes))
    assert torch.equal(plain.block_scales, negated.block_scales)


def test_element_codes_equal_torchao_given_the_scales() -> None:
    torch.manual_seed(4)
    x = gaussian(64, 256).bfloat16()
    quantized = quantize_activation(x, MINITE)
    step = (codec_e4m3.decode(quantized.block_scales) * quantized.outer_scales).repeat_interleave(16, dim=1)
    scaled = (x.float() / step).clamp(-6, 6)
    assert torch.equal(unpack(quantized.codes), f32_to_f4_unpacked(scaled))


def test_whole_chain_equals_torchao_where_scales_are_powers_of_two() -> None:
    """torchao multiplies by reciprocals, which are exact when every scale is a power of two."""
    torch.manual_seed(5)
    blocks = torch.rand(64, 8, 16) * 2 - 1
    blocks[..., 3] = 1.0
    x = blocks * 6 * torch.exp2(torch.randint(-6, 9, (64, 8, 1)).float())  # block scales 2^-6 to 2^8
    x[:, 0, 0] = 2688.0  # so that g = 1; the first block's scale is 448
    x = x.flatten(1).bfloat16()
    ours = quantize_activation(x, MINITE)
    assert (ours.outer_scales == 1).all()
    scales, codes = nvfp4_quantize(x, per_tensor_scale=torch.tensor(1.0))
    exact = torch.ones(64, 8, dtype=torch.bool)
    exact[:, 0] = False  # 1/448 is not exact
    assert torch.equal(ours.block_scales, scales.view(torch.uint8))
    assert torch.equal(ours.codes.view(64, 8, 8)[exact], codes.view(64, 8, 8)[exact])


@pytest.mark.parametrize("spec", [PER_ROW, PER_EXPERT], ids=lambda spec: spec.outer_domain)
def test_dequantised_values_are_the_product_of_the_three_parts(spec: QuantizerSpec) -> None:
    torch.manual_seed(6)
    weight = torch.randn(2, 24, 64)
    quantized = quantize_weight(weight, spec)
    value = decode(quantized, spec).double() * quantized.outer_scales.double()[..., None]
    assert torch.equal(dequantize(quantized, spec), value.float())
    error = (dequantize(quantized, spec) - weight).norm() / weight.norm()
    assert 0.05 < error < 0.12  # E2M1 with block scales on Gaussian data: about a tenth

"""What holds for every catalogued quantiser, for any data (Hypothesis)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kernels.catalogue import CATALOGUE, named_spec
from kernels.formats import ELEMENTS
from kernels.packing import pack, unpack
from kernels.quantize import (
    QuantizedTensor,
    decode,
    decode_scale,
    dequantize,
    logical_scales,
    quantize_activation,
    quantize_weight,
    stored_scales,
)
from kernels.quantizer_spec import (
    Block,
    BlockScaleFloor,
    BlockScaleFormat,
    CodeLayout,
    Element,
    OuterStored,
    QuantizerSpec,
    Rounding,
    ScaleDomain,
    Selector,
)
from kernels.swizzle import swizzle_128x4, swizzled_size, unswizzle_128x4
from kernels.transform import hadamard_16, hadamard_matrix


class Case(NamedTuple):
    name: str
    spec: QuantizerSpec


def cases() -> list[Case]:
    """Every different quantiser of the catalogue, by the first entry that has it."""
    found: dict[QuantizerSpec, str] = {}
    for name in CATALOGUE:
        spec = named_spec(name)
        for role in ("activation", "weight", "gradient"):
            quantizer = getattr(spec, role)
            if quantizer is not None:
                found.setdefault(quantizer, f"{name}.{role}")
    return [Case(name, spec) for spec, name in found.items()]


CASES = cases()
ACTIVATIONS = [case for case in CASES if case.spec.outer_domain in ("none", "token", "tensor")]
EXACT = [case for case in ACTIVATIONS if case.spec.rounding is Rounding.NEAREST_EVEN]
BLOCKED = [case for case in EXACT if case.spec.block is not Block.NONE]
PER_ROW = [case for case in EXACT if case.spec.outer_domain is not ScaleDomain.TENSOR]
PER_TENSOR = [case for case in EXACT if case.spec.outer_domain is ScaleDomain.TENSOR]


def over(found: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("spec", [pytest.param(case.spec, id=case.name) for case in found])


SEEDS = st.integers(0, 2**31)
few = settings(deadline=None, max_examples=10)


def rows(seed: int, count: int = 6, width: int = 64) -> torch.Tensor:
    """bfloat16 with outliers, zeros, and blocks of different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    x = x.sign() * x.abs() ** 3
    blocks = torch.randint(-6, 7, (count, width // 16), generator=generator).float()
    x *= torch.exp2(blocks).repeat_interleave(16, dim=1)
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0.0
    return x.bfloat16()


def seed_of(spec: QuantizerSpec, seed: int) -> int | None:
    return seed if spec.rounding is Rounding.STOCHASTIC else None


def quantize(x: torch.Tensor, spec: QuantizerSpec, seed: int = 0) -> QuantizedTensor:
    return quantize_activation(x, spec, seed=seed_of(spec, seed))


def parts(quantized: QuantizedTensor) -> list[torch.Tensor]:
    found = quantized.codes, quantized.block_scales, quantized.outer_scales
    return [part for part in found if part is not None]


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return all(torch.equal(left, right) for left, right in zip(parts(a), parts(b), strict=True))


@settings(deadline=None)
@given(arrays(np.uint8, array_shapes(min_dims=1, max_dims=3, max_side=8)))
def test_packing_and_unpacking_are_inverse(packed: np.ndarray) -> None:
    codes = unpack(torch.from_numpy(packed))
    assert codes.max() < 16 and torch.equal(pack(codes), torch.from_numpy(packed))


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 300), columns=st.integers(1, 13), seed=SEEDS)
def test_swizzling_and_unswizzling_are_inverse(count: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(1, 256, (2, count, columns), dtype=torch.uint8, generator=generator)
    swizzled = swizzle_128x4(scales)
    assert swizzled.shape == (2, swizzled_size(count, columns))
    assert torch.equal(unswizzle_128x4(swizzled, count, columns), scales)
    assert int((swizzled != 0).sum()) == scales.numel()  # padding is zero
    m, k = count - 1, columns - 1
    place = (m // 128 * -(-columns // 4) + k // 4) * 512 + m % 32 * 16 + m // 32 % 4 * 4 + k % 4
    assert swizzled[1, place] == scales[1, m, k]


def test_unswizzling_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="5 x 4 blocks need 512 bytes, got 511"):
        unswizzle_128x4(torch.zeros(511, dtype=torch.uint8), 5, 4)


@over(CASES)
@few
@given(seed=SEEDS, count=st.integers(1, 40))
def test_scales_travel_in_their_layout_and_back(spec: QuantizerSpec, seed: int, count: int) -> None:
    x = rows(seed, count)
    quantized = (
        quantize(x, spec)
        if spec.outer_domain in ("none", "token", "tensor")
        else quantize_weight(x[None], spec)
    )
    if quantized.block_scales is not None:
        stored = stored_scales(quantized, spec)
        assert stored is not None
        assert torch.equal(logical_scales(stored, spec, count, x.shape[1]), quantized.block_scales)


@over(BLOCKED)
@few
@given(seed=SEEDS)
def test_quantising_what_was_quantised_changes_nothing(spec: QuantizerSpec, seed: int) -> None:
    """Blocks that hold the largest code, under an outer scale that is a power of two."""
    generator = torch.Generator().manual_seed(seed)
    width = spec.width_multiple
    largest = 2 ** (3 if spec.element is Element.E2M1 else 5 if spec.element != "e4m3" else 7) - 1
    largest -= spec.element is Element.E4M3  # 0x7F is NaN
    codes = torch.randint(0, largest + 1, (4, 4 * width), dtype=torch.uint8, generator=generator)
    codes[:, ::width] = largest
    scales = torch.exp2(torch.randint(-3, 4, (4, 4), generator=generator).float())
    if spec.block_scale_format is BlockScaleFormat.E4M3:
        scales[:, 0] = spec.block_scale_max
    values = ELEMENTS[spec.element].decode(codes) * scales.repeat_interleave(width, dim=1)
    once = dequantize(quantize(values, spec), spec)
    np.testing.assert_array_equal(once.numpy(), values.numpy())
    assert same(quantize(once, spec), quantize(values, spec))


@over([case for case in BLOCKED if case.spec.selector is Selector.LARGEST])
@few
@given(seed=SEEDS, factor=st.floats(1.0, 8.0))
def test_block_scales_do_not_decrease_with_the_block(spec: QuantizerSpec, seed: int, factor: float) -> None:
    """Blocks of growing size in a row whose largest element stays: their scales grow, or stay."""
    generator = torch.Generator().manual_seed(seed)
    width = spec.width_multiple
    block = torch.rand(width, generator=generator) + 0.5
    growth = torch.linspace(0, 1, 8).unsqueeze(-1) * (factor - 1) + 1
    x = (block * growth).flatten()
    x = torch.cat([x, torch.full((width,), 100.0)]).bfloat16()[None]
    scales = quantize(x, spec).block_scales
    assert scales is not None and (scales[0].int().diff() >= 0).all()


@over(PER_ROW)
@few
@given(seed=SEEDS)
def test_permuted_rows_give_permuted_results(spec: QuantizerSpec, seed: int) -> None:
    x = rows(seed)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    plain, permuted = quantize(x, spec), quantize(x[order], spec)
    for left, right in zip(parts(plain), parts(permuted), strict=True):
        assert torch.equal(left[order], right)


@over(PER_TENSOR)
@few
@given(seed=SEEDS)
def test_permuted_rows_share_their_outer_scale(spec: QuantizerSpec, seed: int) -> None:
    x = rows(seed)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    plain, permuted = quantize(x, spec), quantize(x[order], spec)
    assert torch.equal(plain.codes[order], permuted.codes)
    assert plain.block_scales is not None and permuted.block_scales is not None
    assert torch.equal(plain.block_scales[order], permuted.block_scales)
    assert plain.outer_scales is not None and torch.equal(plain.outer_scales, permuted.outer_scales)


@over(EXACT)
@few
@given(seed=SEEDS, exponent=st.integers(-20, 20))
def test_a_power_of_two_moves_into_the_scales(spec: QuantizerSpec, seed: int, exponent: int) -> None:
    x = rows(seed)
    x[:, 0] = 300.0  # away from the rules for small groups
    plain, scaled = quantize(x, spec), quantize(x * 2.0**exponent, spec)
    if spec.block_scale_format is BlockScaleFormat.E8M0:
        assert plain.block_scales is not None and scaled.block_scales is not None
        zero = plain.block_scales == 0
        moved = torch.where(zero, 0, plain.block_scales.int() + exponent)
        assert torch.equal(moved, scaled.block_scales.int())
        assert torch.equal(plain.codes, scaled.codes)
        return
    assert torch.equal(plain.codes, scaled.codes)
    for left, right in zip(parts(plain)[1:-1], parts(scaled)[1:-1], strict=True):
        assert torch.equal(left, right)
    factor = 2.0**-exponent if spec.outer_stored is OuterStored.ENCODE else 2.0**exponent
    assert torch.equal(parts(plain)[-1] * factor, parts(scaled)[-1])


@over(PER_ROW)
@few
@given(seed=SEEDS, row=st.integers(0, 5))
def test_a_row_does_not_depend_on_the_others(spec: QuantizerSpec, seed: int, row: int) -> None:
    x = rows(seed)
    one, whole = quantize(x[row : row + 1], spec), quantize(x, spec)
    for left, right in zip(parts(one), parts(whole), strict=True):
        assert torch.equal(left, right[row : row + 1])


@over(PER_TENSOR)
@few
@given(seed=SEEDS)
def test_a_row_depends_on_the_others_under_one_scale_for_all(spec: QuantizerSpec, seed: int) -> None:
    """Another row with an element that is a third larger than any, and no power of two, moves the first's scales."""
    x = rows(seed, count=2)
    x[0, ::7] += 1.0
    alone = quantize(x, spec)
    x[1, 5] = 1.37 * x.abs().max()
    beside = quantize(x, spec)
    assert not torch.equal(dequantize(alone, spec)[0], dequantize(beside, spec)[0])


@over([case for case in EXACT if case.spec.block_scale_floor is BlockScaleFloor.NONE])
@few
@given(seed=SEEDS)
def test_values_are_close_to_what_was_quantised(spec: QuantizerSpec, seed: int) -> None:
    """Within half of the widest gap between codes of a block's largest element, plus what a scale's rounding moves."""
    x = rows(seed)
    x = x.where(x.abs() > 1e-3, torch.tensor(0.0).bfloat16())
    width = spec.width_multiple if spec.block is not Block.NONE else x.shape[1]
    amax = x.float().abs().view(len(x), -1, width).amax(-1).repeat_interleave(width, dim=1)
    error = (dequantize(quantize(x, spec), spec) - x.float()).abs()
    bound = 0.27 if spec.element is Element.E2M1 else 0.13
    largest = x.float().abs().max() if spec.outer_domain is ScaleDomain.TENSOR else amax
    assert (error <= bound * amax + 2.0**-10 / 448 * largest).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_stochastic_rounding_keeps_the_expectation(seed: int) -> None:
    """Of elements that do not saturate; a thousand equal rows are rounded independently."""
    spec = named_spec("te_per_tensor").gradient
    assert spec is not None and spec.rounding is Rounding.STOCHASTIC
    row = rows(seed, count=1, width=256).float()
    x = row.repeat(1000, 1)
    quantized = quantize_activation(x, spec, seed=5)
    assert same(quantized, quantize_activation(x, spec, seed=5))
    assert not torch.equal(quantized.codes, quantize_activation(x, spec, seed=6).codes)
    inside = ((unpack(quantized.codes) & 7) < 7).all(0)
    values = dequantize(quantized, spec).double()[:, inside]
    rotated = hadamard_16(row)[0, inside].double()
    spread = values.std(0)
    gap = dequantize(replace(quantized, codes=torch.full_like(quantized.codes, 0x44)), spec)[
        0, inside
    ]  # 4 - 2
    assert ((values.mean(0) - rotated).abs() <= 5 * spread / 1000**0.5 + 0.01 * gap).all()
    assert (spread > 0).double().mean() > 0.5 and inside.double().mean() > 0.7
    with pytest.raises(ValueError, match="seed=None"):
        quantize_activation(x, spec)


@few
@given(seed=SEEDS)
def test_rotation_is_orthogonal(seed: int) -> None:
    matrix = hadamard_matrix().double()
    assert torch.equal(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25, dtype=torch.float64))
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    parity = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    assert torch.equal(matrix, torch.tensor(signs)[:, None] * parity / 4)
    a, b = rows(seed).float(), rows(seed + 1).float()
    torch.testing.assert_close(
        hadamard_16(a) @ hadamard_16(b).T, a @ b.T, rtol=1e-4, atol=1e-3 * float(a.norm())
    )


@over(CASES)
def test_decoding_without_outer_scale_times_that_scale_is_the_value(spec: QuantizerSpec) -> None:
    x = rows(3)
    activation = spec.outer_domain in ("none", "token", "tensor")
    quantized = quantize(x, spec) if activation else quantize_weight(x[None], spec)
    g = decode_scale(quantized, spec)
    values = decode(quantized, spec)
    if g is not None:
        values = values * (g if activation else g.unsqueeze(-1))
    assert torch.equal(values, dequantize(quantized, spec))
    if spec.code_layout is CodeLayout.EVEN_LOW:
        assert quantized.codes.shape[-1] * 2 == x.shape[1]


@over(ACTIVATIONS)
def test_no_rows(spec: QuantizerSpec) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        quantized = quantize(torch.zeros(0, 64, dtype=dtype), spec)
        assert dequantize(quantized, spec).shape == (0, 64)
        assert len(quantized.codes) == 0 and (
            quantized.block_scales is None or len(quantized.block_scales) == 0
        )

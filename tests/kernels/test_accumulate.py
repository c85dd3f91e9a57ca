"""Sums along K: against integers and against their definition in numpy."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from layer_oracle import nearest_float32

from kernels.accumulate import product
from kernels.formats import ELEMENTS
from kernels.quantizer_spec import Element
from kernels.spec import Accumulation

ORDERED = [order for order in Accumulation if order is not Accumulation.GEMM]


@pytest.mark.parametrize("width", [16, 1024, 1184])
def test_any_order_is_the_exact_sum_rounded_once(width: int) -> None:
    """Against integers, with operands at both ends of NVFP4's range so that partial sums need all 53 bits."""
    g = torch.Generator().manual_seed(0)
    pool = torch.tensor(
        [2688.0, -2688.0, 2688.0, 2.0**-10, -(2.0**-10), 11 * 2.0**-10, 0.0, 1344.0]
    ).bfloat16()
    x, weight = (pool[torch.randint(8, (n, width), generator=g)] for n in (5, 300))
    x[0], weight[0] = 2688, 2688
    result = product(x, weight, Accumulation.ANY_ORDER)
    scaled_x, scaled_w = ((t.double() * 1024).long().tolist() for t in (x, weight))
    for row in range(5):
        for column in (0, 1, 17, 255, 256, 299):
            exact = sum(a * b for a, b in zip(scaled_x[row], scaled_w[column], strict=True))
            assert abs(exact) < 2**53
            assert result[row, column].item() == np.float32(exact / 2**20)  # int / int is correctly rounded


def test_long_sums_are_sums_of_exact_segments() -> None:
    """Small terms among large ones that cancel: partial sums pass 2^33, where the order of summation shows."""
    g = torch.Generator().manual_seed(0)
    small = (torch.rand(2048, generator=g) < 0.05).repeat(2)
    x = torch.full((1, 4096), 2688.0)
    weight = torch.full((64, 4096), 2688.0)
    weight[:, 2048:] = -2688.0
    x[:, small] = 2.0**-10
    weight[:, small] = torch.randint(16, (64, int(small.sum())), generator=g) * 2.0**-10
    result = product(x.bfloat16(), weight.bfloat16(), Accumulation.ANY_ORDER)[0]
    terms = [[int(term) for term in row] for row in ((x * 1024).double() * (weight * 1024).double()).tolist()]
    for actual, row in zip(result.tolist(), terms, strict=True):
        expected = 0.0
        for start in range(0, 4096, 1024):
            expected += sum(row[start : start + 1024]) / 2**20
        assert actual == np.float32(expected)


@pytest.mark.parametrize(
    ("element", "spread"), [(Element.E2M1, 35), (Element.E2M3, 31), (Element.E3M2, 25), (Element.E4M3, 7)]
)
def test_power_of_two_scales_are_exact_within_the_stated_spread(element: Element, spread: int) -> None:
    """The largest elements under the largest scales cancel, the smallest under the smallest remain."""
    values = [v for v in ELEMENTS[element].values if v > 0]
    low, high = min(values), max(values)
    low_scale, high_scale = 2.0 ** -(spread // 2), 2.0 ** (spread - spread // 2)
    sides = []
    for scale in (
        low_scale,
        high_scale,
    ):  # the product of two block scales: 1 in the first blocks, 2^spread after
        side = torch.full((1, 1024), high * scale * 2.0 ** (spread // 2 - spread + spread // 2))
        side[:, :32] = low
        sides.append(side)
    x, weight = sides
    weight[:, 32::2] *= -1
    exact = sum(Fraction(a) * Fraction(b) for a, b in zip(x[0].tolist(), weight[0].tolist(), strict=True))
    assert exact == 32 * Fraction(low) ** 2
    for order in (torch.arange(1024), torch.arange(1023, -1, -1), torch.randperm(1024)):
        assert product(x[:, order], weight[:, order], Accumulation.ANY_ORDER).item() == float(exact)


def in_order(blocks: list[np.ndarray]) -> np.ndarray:
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total


def in_pairs(blocks: list[np.ndarray]) -> np.ndarray:
    while len(blocks) > 1:
        sums = [a + b for a, b in zip(blocks[::2], blocks[1::2], strict=False)]
        blocks = sums + blocks[2 * len(sums) :]
    return blocks[0]


@pytest.mark.parametrize("width", [16, 32, 48, 80, 112, 208, 272, 8, 40])
def test_fixed_orders_equal_their_definition_in_numpy(width: int) -> None:
    g = torch.Generator().manual_seed(width)
    pool = torch.tensor(ELEMENTS[Element.E2M1].values)
    x, weight = (pool[torch.randint(16, (n, width), generator=g)] for n in (6, 40))
    x *= torch.exp2(torch.randint(-9, 9, (6, -(-width // 16)), generator=g)).repeat_interleave(16, 1)[
        :, :width
    ]
    terms = x.double().numpy()[:, None] * weight.double().numpy()
    blocks = [terms[..., start : start + 16].sum(-1).astype(np.float32) for start in range(0, width, 16)]
    results = {order: product(x, weight, order).numpy() for order in ORDERED}
    np.testing.assert_array_equal(results[Accumulation.BLOCKS_IN_ORDER], in_order(blocks))
    np.testing.assert_array_equal(results[Accumulation.TREE], in_pairs(blocks))
    np.testing.assert_array_equal(results[Accumulation.ANY_ORDER], terms.sum(-1).astype(np.float32))
    if width > 200:
        assert (in_order(blocks) != in_pairs(blocks)).any()


def test_sixteen_products_are_summed_exactly() -> None:
    """Terms that cancel in FP64 but not in FP32."""
    x = torch.tensor([[448.0, 2.0**-9, -448.0, 2.0**-9] * 4])
    weight = torch.tensor([[448.0, 2.0**-9, 448.0, 2.0**-9] * 4])
    for order in ORDERED:
        assert product(x, weight, order).item() == 8 * 2.0**-18


@pytest.mark.parametrize("order", ORDERED)
def test_a_row_does_not_depend_on_the_rows_beside_it(order: Accumulation) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 144, generator=g).bfloat16() for n in (65, 90))
    whole = product(x, weight, order)
    for rows in (1, 2, 3, 5, 8, 17, 33, 64):
        own = torch.randperm(65, generator=g)[:rows]
        assert torch.equal(product(x[own], weight, order), whole[own])


def test_gemm_is_the_library_product() -> None:
    x, weight = torch.randn(5, 40), torch.randn(7, 40)
    assert torch.equal(product(x, weight, Accumulation.GEMM), x @ weight.T)


def test_nearest_float32_of_the_oracle() -> None:
    for value in (1 + 2.0**-24, 1 + 3 * 2.0**-24, 1 + 2.0**-25, 2.0**-150, 3 * 2.0**-150, -(2.0**-149)):
        assert nearest_float32(Fraction(value)) == np.float32(value)

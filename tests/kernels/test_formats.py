"""Element and scale formats, exhaustively: every code, every tie and its neighbours, against exact arithmetic and
other libraries."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats import kernels as torchao

from kernels import codec_e8m0
from kernels.formats import ELEMENTS, ElementFormat
from kernels.quantizer_spec import Element

# Exponent bits, mantissa bits, bias, largest magnitude (OCP Microscaling Formats, section 5.3).
DEFINITIONS = {
    Element.E2M1: (2, 1, 1, 6),
    Element.E2M3: (2, 3, 1, Fraction(15, 2)),
    Element.E3M2: (3, 2, 3, 28),
    Element.E4M3: (4, 3, 7, 448),
}
EVERY_FORMAT = pytest.mark.parametrize("element", Element)
EVERY_POSITIVE_BF16 = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()


def magnitudes(element: Element) -> list[Fraction]:
    """The exact non-negative values by code."""
    exponent_bits, mantissa_bits, bias, largest = DEFINITIONS[element]
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        significand = Fraction(mantissa, 2**mantissa_bits) + (exponent > 0)
        values.append(significand * Fraction(2) ** (max(exponent, 1) - bias))
    return [value for value in values if value <= largest]


def nearest(value: Fraction, values: list[Fraction]) -> int:
    """The code nearest to a magnitude; the even one of two; the last beyond the end."""
    upper = min(bisect_left(values, value), len(values) - 1)
    lower = max(upper - 1, 0)
    below, above = abs(value - values[lower]), abs(values[upper] - value)
    if below == above:
        return lower if lower % 2 == 0 else upper
    return lower if below < above else upper


def critical(element: Element) -> list[float]:
    """Every value and every midpoint, with the float32 numbers on both sides, and what lies beyond the ends."""
    exact = magnitudes(element)
    points = np.array([float(v) for v in exact] + [float((a + b) / 2) for a, b in pairwise(exact)])
    single = points.astype(np.float32)
    assert (single == points).all()
    below = np.nextafter(single, np.float32(-np.inf))
    above = np.nextafter(single, np.float32(np.inf))
    beyond = [float(exact[-1]) * 1.04, float(exact[-1]) * 2, 1e30, 3.4e38, 1e-40, 1e-45]
    return [float(x) for x in np.concatenate([below, single, above, np.float32(beyond)]) if x >= 0]


def native_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


OTHERS: dict[Element, tuple[Callable, Callable]] = {
    Element.E2M1: (torchao.f32_to_f4_unpacked, torchao.f4_unpacked_to_f32),
    Element.E2M3: (torchao.f32_to_f6_e2m3_unpacked, torchao.f6_e2m3_unpacked_to_f32),
    Element.E3M2: (torchao.f32_to_f6_e3m2_unpacked, torchao.f6_e3m2_unpacked_to_f32),
    Element.E4M3: (native_e4m3, lambda codes: codes.view(torch.float8_e4m3fn).float()),
}


def finite_codes(element: ElementFormat) -> torch.Tensor:
    half = 2 ** (element.bits - 1)
    count = len(magnitudes(element.name))
    codes = torch.arange(count, dtype=torch.uint8)
    return torch.cat([codes, codes + half])


@EVERY_FORMAT
def test_every_code_decodes_to_its_value(element: Element) -> None:
    exact = [float(value) for value in magnitudes(element)]
    codes = finite_codes(ELEMENTS[element])
    decoded = ELEMENTS[element].decode(codes)
    assert decoded.tolist() == exact + [-value for value in exact]
    assert torch.signbit(decoded).tolist() == [False] * len(exact) + [True] * len(exact)
    assert ELEMENTS[element].max == exact[-1]
    assert torch.equal(ELEMENTS[element].decode(codes, torch.bfloat16).double(), decoded.double())
    assert torch.equal(decoded, OTHERS[element][1](codes))


@EVERY_FORMAT
def test_encoding_inverts_decoding(element: Element) -> None:
    codes = finite_codes(ELEMENTS[element])
    assert torch.equal(ELEMENTS[element].encode(ELEMENTS[element].decode(codes)), codes)


@EVERY_FORMAT
def test_values_ties_and_their_neighbours_round_to_nearest_even(element: Element) -> None:
    points, values = critical(element), magnitudes(element)
    expected = torch.tensor([nearest(Fraction(x), values) for x in points], dtype=torch.uint8)
    x = torch.tensor(points, dtype=torch.float32)
    assert torch.equal(ELEMENTS[element].encode(x), expected)
    sign = 2 ** (ELEMENTS[element].bits - 1)
    assert torch.equal(ELEMENTS[element].encode(-x), expected + sign)


@EVERY_FORMAT
def test_every_bf16_and_the_critical_points_are_coded_as_another_library_codes_them(element: Element) -> None:
    x = torch.cat([EVERY_POSITIVE_BF16, torch.tensor(critical(element), dtype=torch.float32)])
    x = torch.cat([x, -x]).clamp(-ELEMENTS[element].max, ELEMENTS[element].max)
    assert torch.equal(ELEMENTS[element].encode(x), OTHERS[element][0](x))


@EVERY_FORMAT
def test_large_values_saturate(element: Element) -> None:
    largest = ELEMENTS[element].max
    codes = ELEMENTS[element].encode(torch.tensor([largest, 1.5 * largest, 3e38, -3e38]))
    assert ELEMENTS[element].decode(codes).tolist() == [largest, largest, largest, -largest]


@EVERY_FORMAT
def test_what_is_not_finite_still_has_a_code(element: Element) -> None:
    """Quantisers that report NaN later go on with it."""
    codes = ELEMENTS[element].encode(torch.tensor([torch.nan, -torch.nan, torch.inf]))
    if element is Element.E2M1:
        codes = codes & 15  # as packing takes them
    assert (codes.int() < 2 ** ELEMENTS[element].bits).all()
    ELEMENTS[element].decode(codes)


@EVERY_FORMAT
def test_stochastic_rounding_takes_neighbours_with_the_probability_of_their_distance(
    element: Element,
) -> None:
    exact = [float(value) for value in magnitudes(element)]
    noise = torch.arange(1024) / 1024
    for low, high in pairwise(exact):
        for part in (0.0, 0.25, 0.5):
            x = torch.full_like(noise, low + part * (high - low))
            decoded = ELEMENTS[element].decode(ELEMENTS[element].encode(x, noise))
            assert set(decoded.tolist()) <= {low, high}
            assert (decoded == high).double().mean().item() == part


def test_powers_of_two_scales() -> None:
    every = torch.arange(255, dtype=torch.uint8)
    exponents = every.int() - 127
    assert torch.equal(codec_e8m0.encode(exponents), every)
    assert codec_e8m0.decode(every, torch.float64).tolist() == [2.0**e for e in range(-127, 128)]
    native = every.view(torch.float8_e8m0fnu).float()
    assert torch.equal(codec_e8m0.decode(every), native)
    assert torch.equal(codec_e8m0.decode(every, torch.bfloat16).double(), native.double())
    assert codec_e8m0.encode(torch.tensor([-300, -128, 128, 300])).tolist() == [0, 0, 254, 254]

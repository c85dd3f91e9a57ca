"""Element formats: sign, exponent and mantissa in 4, 6 or 8 bits, without infinities.

A code is the bit pattern in the low bits of a byte. Conversion rounds to nearest, ties to the even code, and
saturates; the sign is kept where the magnitude rounds to zero (OCP Microscaling Formats, section 5.3, and OCP
8-bit Floating Point).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

from kernels import codec_e2m1
from kernels.quantizer_spec import Element


@dataclass(frozen=True)
class ElementFormat:
    """A small floating-point format. `lowest_exponent` is that of its smallest normal number."""

    name: Element
    exponent_bits: int
    mantissa_bits: int
    max: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def negative_zero(self) -> int:
        """The code of -0."""
        return 1 << (self.bits - 1)

    @property
    def lowest_exponent(self) -> int:
        return 2 - 2 ** (self.exponent_bits - 1)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """By code; codes of NaN are given the value NaN."""
        half = 2 ** (self.bits - 1)
        steps = 2**self.mantissa_bits
        magnitudes = []
        for code in range(half):
            exponent, mantissa = divmod(code, steps)
            fraction = mantissa / steps + (exponent > 0)
            value = math.ldexp(fraction, max(exponent - 1, 0) + self.lowest_exponent)
            magnitudes.append(value if value <= self.max else math.nan)
        return (*magnitudes, *(-value for value in magnitudes))

    def encode(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """float32 of any shape -> uint8 codes; NaN has some code.

        noise: uniform in [0, 1), of the shape of x: rounds stochastically, up with the probability that keeps the
        expectation. Magnitudes beyond `max` saturate.
        """
        if noise is None and self.name is Element.E2M1:
            return codec_e2m1.encode(x)
        magnitude = x.abs().clamp_(max=self.max)
        smallest_normal = math.ldexp(1.0, self.lowest_exponent)
        exponent = torch.frexp(magnitude.clamp(min=smallest_normal)).exponent - 1
        # In units of the last place at that exponent, where a power-of-two factor is exact.
        units = torch.ldexp(magnitude, self.mantissa_bits - exponent)
        index = units.round() if noise is None else (units + noise).floor()
        # A carry into the next exponent gives the right code: its mantissa is then zero.
        code = ((exponent - self.lowest_exponent) << self.mantissa_bits) + index.to(torch.int32)
        sign = (x.view(torch.int32) < 0).to(torch.int32) << (self.bits - 1)
        return ((code | sign) & (2**self.bits - 1)).to(torch.uint8)  # a code even where x is NaN

    def decode(self, codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """uint8 codes -> their values, exact in bfloat16 and wider."""
        table = torch.tensor(self.values, dtype=dtype, device=codes.device)
        return table[codes.long()]


ELEMENTS: Mapping[Element, ElementFormat] = MappingProxyType(
    {
        element.name: element
        for element in (
            ElementFormat(Element.E2M1, 2, 1, 6.0),
            ElementFormat(Element.E2M3, 2, 3, 7.5),
            ElementFormat(Element.E3M2, 3, 2, 28.0),
            ElementFormat(Element.E4M3, 4, 3, 448.0),
        )
    }
)

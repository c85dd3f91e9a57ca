"""Exact sums of products: operands in fixed point, accumulated in FP64 without any rounding.

A row x of K elements with largest magnitude below 2^e (e the least such integer) is taken as integers

    X = round(x * 2^(b - e))        nearest, ties to even; |X| <= 2^b

with b = 21 for activations and b = 22 for weights (one e for each token and each output feature). Over 1024 elements
|sum X W| <= 2^10 * 2^21 * 2^22 = 2^53, so FP64 holds it and every partial sum exactly: the order of the sum, fused
multiply-add or not, the blocking of a matrix product and the number of threads cannot matter. Longer rows are cut into
segments of 1024 elements, counted from the first one, whose sums are added in order. Two powers of two and one rounding
to FP32 give the product. Zeros behind a row's last element change nothing.

What fixed point leaves out of an element is at most 2^-22 (activations) or 2^-23 (weights) of its row's largest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch

ACTIVATION_BITS, WEIGHT_BITS = 21, 22
SEGMENT = 1024
_LEAST_EXPONENT = -256  # of rows of zeros; FP32 has none so small


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """Rows of integers: values are `integers` * `scale`. float64 [..., R, K] and powers of two, float64 [..., R, 1]."""

    integers: torch.Tensor
    scale: torch.Tensor


def fixed_point(x: torch.Tensor, bits: int) -> FixedPoint:
    """x [..., R, K] of any float type; each row of K elements has a scale of its own. What is not finite stays so."""
    exponent = exponents(x.abs().amax(-1, keepdim=True).double())
    return FixedPoint((x * power_of_two(bits - exponent)).round_(), power_of_two(exponent - bits))


def product(x: FixedPoint, weight: FixedPoint) -> torch.Tensor:
    """[..., R, K] of `ACTIVATION_BITS` and [..., N, K] of `WEIGHT_BITS` -> x @ weight.T, float32 [..., R, N]."""
    total = segments_product(x.integers, weight.integers.transpose(-1, -2))
    return (total * x.scale * weight.scale.transpose(-1, -2)).float()


def segments_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Integers [..., R, K] and [..., K, N] as float64 -> float64 [..., R, N], segments of K added in order."""
    if left.shape[-1] <= SEGMENT:
        return left @ right
    pairs = zip(left.split(SEGMENT, dim=-1), right.split(SEGMENT, dim=-2), strict=True)
    return reduce(torch.add, (a @ b for a, b in pairs))


def exponents(magnitude: torch.Tensor) -> torch.Tensor:
    """float64, not negative -> int64 e with 2^(e - 1) <= magnitude < 2^e."""
    return ((magnitude.view(torch.int64) >> 52) - 1022).clamp_(min=_LEAST_EXPONENT)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """int64 in [-1022, 1023] -> float64 2^exponent, by its bits (`torch.pow` may round)."""
    return ((exponent + 1023) << 52).view(torch.float64)

"""Exponential, logarithm and sum out of operations that IEEE 754 defines to the bit.

A library's exponential is one function for the vectors of a tensor and another for the elements behind the last whole
vector, so that a value's bits depend on where in the tensor it stands. Here every step is a PyTorch call of its own.
"""

from __future__ import annotations

import math

import torch

# ln 2 in two parts: products of the first, of 12 bits, with the integers that occur here are exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, math.log(2) - 0.693359375
_SMALLEST = -87.0  # exp of less counts as 0: it would be close to FP32's least normal number
# Elements that pass through all steps together: on a CPU in its cache, on a GPU in few launches.
_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 24}
_EXP_DEGREE = 7  # the remainder of the Taylor series is below 2^-27 on [-ln 2 / 2, ln 2 / 2]
_LOG_TERMS = 12  # of 2 (z + z^3 / 3 + ...), |z| <= 0.172: the remainder is below 2^-66


def exp(x: torch.Tensor) -> torch.Tensor:
    """float32, not positive -> exp(x) within 2 units in the last place; 0 below -87; NaN stays NaN.

    exp(x) = 2^n exp(r), n = round(x / ln 2), r = x - n ln 2 (Cody and Waite 1980, "Software Manual for the Elementary
    Functions").
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    at_once = _AT_ONCE[x.device.type]
    for source, target in zip(x.reshape(-1).split(at_once), out.view(-1).split(at_once), strict=True):
        _exp(source, target)
    return out


def _exp(x: torch.Tensor, out: torch.Tensor) -> None:
    clamped = x.clamp(min=_SMALLEST)
    n = (clamped * (1 / math.log(2))).round_()
    r = clamped.sub_(n * _LN2_HIGH).sub_(n * _LN2_LOW)
    total = r * (1 / math.factorial(_EXP_DEGREE))
    for power in range(_EXP_DEGREE - 1, -1, -1):
        total = total.add_(1 / math.factorial(power))
        if power:
            total = total.mul_(r)
    # NaN has no integer; it is in `total`, whatever the power of two.
    scale = ((n.nan_to_num_().int() + 127) << 23).view(torch.float32)
    torch.mul(total, scale, out=out).masked_fill_(x < _SMALLEST, 0.0)


def log(x: torch.Tensor) -> torch.Tensor:
    """float32, positive, finite and normal -> float32 log(x), computed in FP64 and rounded once; NaN stays NaN.

    log(2^n m) = n ln 2 + 2 artanh((m - 1) / (m + 1)), sqrt(1/2) <= m < sqrt(2).
    """
    wide = x.double()
    bits = wide.view(torch.int64)
    exponent = (bits >> 52) - 1022  # m in [1/2, 1)
    mantissa = ((bits & ((1 << 52) - 1)) | (1022 << 52)).view(torch.float64)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    exponent = exponent - small.long()
    z = (mantissa - 1) / (mantissa + 1)
    square = z * z
    total = torch.full_like(z, 1 / (2 * _LOG_TERMS - 1))
    for term in range(_LOG_TERMS - 2, -1, -1):
        total = (total * square).add_(1 / (2 * term + 1))
    result = exponent.double() * math.log(2) + 2 * z * total
    return torch.where(wide.isfinite(), result, wide).float()


def halves_sum(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., K] -> [..., 1]: the second half is added to the first until one element is left.

    K is first filled up with zeros to a power of two; more zeros would not change the sum.
    """
    width = x.shape[-1]
    size = 1 << (width - 1).bit_length()
    if size == width:
        total = x
    else:  # what is beyond the end is zero and need not be added
        size //= 2
        total = x[..., :size].clone()
        total[..., : width - size] += x[..., size:]
    while size > 1:
        size //= 2
        total = total[..., :size] + total[..., size:]
    return total

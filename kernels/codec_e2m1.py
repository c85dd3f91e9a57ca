"""E2M1, the 4-bit element of NVFP4: a sign, two exponent bits, one mantissa bit; no infinity, no NaN.

A code is the magnitude's index (0 to 7) in 0, 0.5, 1, 1.5, 2, 3, 4, 6, plus 8 for a negative sign
(OCP Microscaling Formats, section 5.3.3).
"""

from __future__ import annotations

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = MAGNITUDES + tuple(-m for m in MAGNITUDES)  # by code; VALUES[8] is -0.0
MAX = 6.0


def encode(x: torch.Tensor) -> torch.Tensor:
    """float32 of any shape, no NaN -> uint8 codes; nearest, ties to the even code, saturating at 6.

    The sign is kept where the magnitude rounds to zero, -0 included, as `cvt.rn.satfinite.e2m1x2` does.
    """
    # The index is piecewise linear in the magnitude: steps of 1/2 from 0 to 2, of 1 from 2 to 4, of 2 from
    # 4 to 6. Clamping to a piece and scaling by a power of two are exact, and `round` takes ties to even,
    # which is the even code: index = round(2 * [0, 2]) + (round([2, 4]) - 2) + (round([4, 6] / 2) - 2).
    magnitude = x.abs()
    index = magnitude.clamp(max=2).mul_(2).round_()
    index += magnitude.clamp(2, 4).round_()
    index += magnitude.clamp_(4, 6).mul_(0.5).round_()
    sign = (x.view(torch.int32) >> 28).to(torch.int8) & 8
    return (index.to(torch.int8).sub_(4) | sign).view(torch.uint8)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 codes (0 to 15) -> their values, exact in bfloat16 and wider."""
    return torch.tensor(VALUES, dtype=dtype, device=codes.device)[codes.long()]

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
    magnitude = x.abs()
    # The index is piecewise linear in the magnitude, with steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6.
    # `round` takes ties to even, which is the even code because each piece starts at an even index.
    # Subtracting a piece's start is exact, so nothing is rounded before `round`.
    index = magnitude.clamp(max=2).mul_(2).round_()
    index += magnitude.clamp(2, 4).sub_(2).round_()
    index += magnitude.clamp_(4, 6).sub_(4).mul_(0.5).round_()
    return index.to(torch.uint8) + torch.signbit(x).to(torch.uint8) * 8


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 codes (0 to 15) -> their values, exact in bfloat16 and wider."""
    return torch.tensor(VALUES, dtype=dtype, device=codes.device)[codes.long()]

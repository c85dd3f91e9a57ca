"""E4M3 without infinities (`float8_e4m3fn`), the block scale of NVFP4: exponent bias 7, 3 mantissa bits.

Magnitudes reach from 2^-9 (subnormal) to 448; bytes 0x7F and 0xFF are NaN (OCP 8-bit Floating Point, 5).
Scales are not negative, so only bytes 0x00 to 0x7E occur here.
"""

from __future__ import annotations

import torch

MAX = 448.0


def encode(x: torch.Tensor) -> torch.Tensor:
    """float32 >= 0 of any shape, no NaN -> uint8 bytes; nearest, ties to even mantissa, saturating at 448."""
    return x.clamp(max=MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode(scale_bytes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 bytes -> their values, exact in bfloat16 and wider."""
    return scale_bytes.view(torch.float8_e4m3fn).to(dtype)

"""E8M0, the block scale of the MX formats: a power of two from 2^-127 to 2^127; byte 0xFF is NaN.

(OCP Microscaling Formats, section 5.4.1.)
"""

from __future__ import annotations

import torch

BIAS = 127


def encode(exponents: torch.Tensor) -> torch.Tensor:
    """Integer exponents of any shape -> uint8 bytes, saturating at both ends."""
    return exponents.clamp(-BIAS, BIAS).add(BIAS).to(torch.uint8)


def decode(scale_bytes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 bytes (not 0xFF) -> their values, exact in bfloat16 and wider (2^-127 is subnormal)."""
    exponents = scale_bytes.to(torch.int32) - BIAS
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents).to(dtype)

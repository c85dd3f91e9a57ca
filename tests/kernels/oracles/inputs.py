"""Inputs that reach every branch of a quantiser. Each draw is float32 [R, K]; callers cast."""

from __future__ import annotations

from collections.abc import Callable

import torch

Draw = Callable[[], torch.Tensor]
WIDTH = 256


def _per_block(rows: int, low: int, high: int) -> torch.Tensor:
    exponents = torch.randint(low, high, (rows, WIDTH // 16)).float()
    return torch.exp2(exponents).repeat_interleave(16, dim=1)


def gaussian() -> torch.Tensor:
    return torch.randn(48, WIDTH)


def heavy_tailed() -> torch.Tensor:
    """Outliers, and rows and blocks of very different size: block scales that are subnormal in E4M3, or zero."""
    student = torch.distributions.StudentT(1.0).sample((48, WIDTH))
    return student * _per_block(48, -24, 1) * torch.exp2(torch.randint(-30, 30, (48, 1)).float())


def subnormal_scales() -> torch.Tensor:
    """One large block in each row; the others' scales are around E4M3's subnormal numbers and its underflow."""
    x = torch.randn(48, WIDTH).clamp(-3, 3) * _per_block(48, -26, -8)
    x[:, :16] *= 2.0**26
    x[:, 0] = 2.0**8
    return x


def midpoint_dense() -> torch.Tensor:
    """Small multiples of powers of two, whose quotients often fall on ties of E4M3 and E2M1."""
    integers = torch.randint(-24, 25, (64, WIDTH)).float()
    integers[:, ::16] = 24.0  # a quotient of 6 or near it, so that the others are multiples of a quarter
    integers[:, 0] = 448 * 24.0
    return integers * _per_block(64, -4, 5)


def _scale_ties(g: int) -> torch.Tensor:
    """Block maxima of 6 * g * t for t halfway between two E4M3 numbers, under an outer scale of g, whose reciprocal
    is not exact."""
    halfway = (
        (2 * torch.randint(8, 16, (32, WIDTH // 16)) + 1)
        / 16
        * torch.exp2(torch.randint(-6, 8, (32, WIDTH // 16)).float())
    )
    x = (torch.rand(32, WIDTH) - 0.5) * (6 * g * halfway).repeat_interleave(16, dim=1)
    x[:, ::16] = 6 * g * halfway
    x[:, 0] = 2688.0 * g
    return x


def scale_ties_3() -> torch.Tensor:
    return _scale_ties(3)


def scale_ties_5() -> torch.Tensor:
    return _scale_ties(5)


def zeros() -> torch.Tensor:
    """Zero rows and blocks, single values, both signs of zero."""
    x = torch.randn(16, WIDTH)
    x[3] = 0.0
    x[4] = -0.0
    x[5, 16:] = 0.0
    x[6, 32:64] = -0.0
    x[7] = 0.0
    x[7, 100] = -1.0
    x[8, ::2] = -0.0
    x[9, ::3] = 0.0
    x[10] *= -1e-3
    x[10, 0] = 1e4  # small negative values, which round to zero, and underflow
    return x


def all_zero() -> torch.Tensor:
    x = torch.zeros(4, WIDTH)
    x[1] = -0.0
    return x


def huge() -> torch.Tensor:
    return (torch.rand(8, WIDTH) - 0.5) * 6.6e38


def large_rows() -> torch.Tensor:
    """Rows from 2^-30 to 2^60."""
    return torch.randn(46, WIDTH) * torch.exp2(torch.arange(-30, 62, 2).float())[:, None]


DRAWS: list[Draw] = [
    gaussian,
    heavy_tailed,
    subnormal_scales,
    midpoint_dense,
    scale_ties_3,
    scale_ties_5,
    zeros,
    huge,
    large_rows,
]

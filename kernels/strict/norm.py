"""RMS norm over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.model_spec import Sums
from kernels.strict.elementary import halves_sum
from kernels.strict.gradient import with_gradient_of


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rule: Sums) -> torch.Tensor:
    """[..., K] and [K] -> x * (1 / sqrt(mean(x^2) + eps)) * weight in x.dtype, in FP32 inside and cast once."""

    def usual(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def strict(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        total = halves_sum(wide * wide)
        mean = total / torch.full_like(
            total, x.shape[-1]
        )  # a number would be multiplied by its reciprocal on a GPU
        inverse = torch.ones_like(mean) / (mean + eps).sqrt_()
        return (wide * inverse).mul_(weight.float()).to(x.dtype)

    return usual(x, weight) if rule is Sums.LIBRARY else with_gradient_of(usual, strict, x, weight)

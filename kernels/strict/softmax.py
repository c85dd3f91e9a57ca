"""Log-probabilities over the vocabulary, and temperature."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.model_spec import Sums
from kernels.strict.elementary import exp, halves_sum, log
from kernels.strict.gradient import with_gradient_of


def at_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float32 [N, V] and [N] -> logits / temperature, by division (by a number, PyTorch may multiply instead)."""
    return logits / temperature[:, None]


def log_softmax(logits: torch.Tensor, rule: Sums) -> torch.Tensor:
    """float32 [N, V] -> (x - max) - log(sum of exp(x - max)), float32 [N, V]."""

    def usual(logits: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(logits, dim=-1)

    def strict(logits: torch.Tensor) -> torch.Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        return shifted - log(halves_sum(exp(shifted)))

    return usual(logits) if rule is Sums.LIBRARY else with_gradient_of(usual, strict, logits)

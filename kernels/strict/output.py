"""The output layer: from hidden states to log-probabilities, under one temperature."""

from __future__ import annotations

import torch

from kernels.model_spec import ModelSpec
from kernels.strict.linear import Weight, linear
from kernels.strict.softmax import at_temperature, log_softmax


class OutputLayer:
    """The steps that learner and sampler share. weight [V, H] is given with each call; what is made of it is kept."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self.weight = Weight()

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[N, H] of any float type -> float32 [N, V], differentiable in both."""
        return linear(hidden, weight, self.weight, self.model.linear, torch.float32)

    def log_softmax(self, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """float32 [N, V] and temperatures float32 [N] -> float32 [N, V]."""
        return log_softmax(at_temperature(logits, temperature), self.model.log_softmax)

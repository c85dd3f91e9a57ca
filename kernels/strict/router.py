"""Which experts a token takes, and with which coefficients."""

from __future__ import annotations

import torch

from kernels.model_spec import Sums
from kernels.strict.elementary import exp, halves_sum
from kernels.strict.gradient import with_gradient_of


def route(
    logits: torch.Tensor, top_k: int, renormalize: bool, rule: Sums
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [T, E] -> ids int64 [T, k] by descending logit, ties to the lower id, and coefficients float32 [T, k].

    renormalize: softmax over the chosen logits, else over all of them. Coefficients are differentiable in the logits.
    """
    ids = logits.detach().argsort(dim=-1, descending=True, stable=True)[:, :top_k]

    def usual(logits: torch.Tensor) -> torch.Tensor:
        return logits.gather(1, ids).softmax(-1) if renormalize else logits.softmax(-1).gather(1, ids)

    def strict(logits: torch.Tensor) -> torch.Tensor:
        chosen = logits.gather(1, ids)
        over = chosen if renormalize else logits
        largest = over.amax(-1, keepdim=True)
        return exp(chosen - largest) / halves_sum(exp(over - largest))

    return ids, usual(logits) if rule is Sums.LIBRARY else with_gradient_of(usual, strict, logits)

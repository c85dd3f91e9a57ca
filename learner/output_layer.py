"""The output layer in BF16 on a GPU together with the scores of its tokens, so that logits are not kept.

Logits are FP32 sums on tensor cores (see `learner.widened`). Rows are taken in chunks; the gradient computes a chunk's
logits anew, and hands them on as two BF16 terms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from learner.widened import fp32_product


def scored_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    rows: int,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden bfloat16 [N, H], weight bfloat16 [V, H], both on a GPU, ids int64 [N] -> log-probabilities of the ids and
    entropies, float32 [N]; rows: of a chunk. The entropy carries a gradient only with `entropy_gradient`.
    """
    return _ScoredTokens.apply(hidden, weight, ids, temperature, rows, entropy_gradient)


class _ScoredTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        ids: torch.Tensor,
        temperature: float,
        rows: int,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from kernels.triton.outside.token_scores import TokenStatistics, token_statistics  # needs a GPU

        chunks = zip(hidden.split(rows), ids.split(rows), strict=True)
        found = [token_statistics(fp32_product(own, weight.T), wanted, temperature) for own, wanted in chunks]
        whole = TokenStatistics(*(torch.cat(column) for column in zip(*found, strict=True)))
        ctx.save_for_backward(hidden, weight, ids, *whole)
        ctx.settings = temperature, rows, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(whole.entropy)
        return whole.logp, whole.entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        from kernels.triton.outside.token_scores import TokenStatistics, logits_gradient

        hidden, weight, ids, *found = ctx.saved_tensors
        temperature, rows, entropy_gradient = ctx.settings
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(hidden), rows):
            here = slice(start, start + rows)
            statistics = TokenStatistics(*(own[here] for own in found))
            d_logp, d_entropy = (gradient[here] for gradient in gradients)
            terms = logits_gradient(
                fp32_product(hidden[here], weight.T),
                ids[here],
                temperature,
                statistics,
                d_logp,
                d_entropy if entropy_gradient else None,
            )
            d_hidden[here] = fp32_product(terms.flatten(0, 1), weight).unflatten(0, (2, -1)).sum(0)
            d_weight += fp32_product(terms.flatten(0, 1).T, hidden[here].repeat(2, 1))
        return d_hidden, d_weight.to(weight.dtype), None, None, None, None

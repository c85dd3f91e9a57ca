"""Floating-point operations of the model, and from them how well a GPU is used.

A parameter that multiplies a token costs two operations in the forward pass and four in the backward pass; a token
attends to itself and what stands before it. That is model FLOPs utilisation as defined by Chowdhery et al. 2022 (arXiv
2204.02311, appendix B), but for attention, of which the half that causality leaves is counted. What is computed anew
(recomputation) is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from learner.families.architecture import Architecture
from rl.preflight.parameters import active


def forward_flops(model: Architecture, lengths: Iterable[int], scored: int | None = None) -> float:
    """Of sequences of these lengths. scored: tokens for which the output layer is computed; None: all."""
    lengths = list(lengths)
    tokens = sum(lengths)
    output = model.vocab * model.hidden
    pairs = sum(n * (n + 1) // 2 for n in lengths)  # of a token and one that it attends to
    attention = 4 * model.layers * model.heads * model.head_dim * pairs
    return (
        2.0 * (active(model) - output) * tokens
        + 2.0 * output * (tokens if scored is None else scored)
        + attention
    )


def update_flops(model: Architecture, lengths: Iterable[int], scored: int | None = None) -> float:
    """Of the forward and backward pass over these sequences."""
    return 3 * forward_flops(model, lengths, scored)

"""Group-relative advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

EPSILON = 1e-6


def group_advantages(
    rewards: torch.Tensor | Sequence[Sequence[float]], epsilon: float = EPSILON
) -> torch.Tensor:
    """(r - mean) / (std + epsilon) within each group, float64 [G, N]; zero throughout where all N are equal.

    rewards: [G, N] real, one row a group: the N responses to one prompt. All are computed in float64.

    GRPO (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1.2) and DAPO (Yu et al. 2025, arXiv
    2503.14476, eq. 9) divide by the group's standard deviation and do not say of which kind; here it is that
    of the population (sum of squares over N).

    Raises ValueError when the shape is not [G, N] with N >= 1 or a reward is not finite.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if rewards.dim() != 2 or rewards.shape[1] < 1:
        raise ValueError(f"rewards must have shape [groups, group size], got {tuple(rewards.shape)}")
    if not bool(rewards.isfinite().all()):
        raise ValueError(f"rewards must be finite, {int((~rewards.isfinite()).sum())} are not")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = centred.square().mean(dim=1, keepdim=True).sqrt()
    # The mean of equal numbers may differ from them by rounding, which a tiny std would blow up.
    constant = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(constant, 0.0, centred / (std + epsilon))

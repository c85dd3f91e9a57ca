"""Advantages: relative to the group of responses to one prompt, or from a value function. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

EPSILON = 1e-6


def group_advantages(
    rewards: torch.Tensor | Sequence[Sequence[float]], estimator: str = "grpo", epsilon: float = EPSILON
) -> torch.Tensor:
    """Advantages of the N responses within each group, float64 [G, N]; zero throughout where all N are equal.

    rewards: [G, N] real, one row a group: the N responses to one prompt. All are computed in float64.

    grpo: (r - mean) / (std + epsilon). GRPO (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1.2) and
    DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 9) divide by the group's standard deviation and do not say of which
    kind; here it is that of the population (sum of squares over N).
    dr_grpo: r - mean (Liu et al. 2025, Dr. GRPO, arXiv 2503.20783, section 3.2).
    leave_one_out: r - mean of the others (Ahmadian et al. 2024, RLOO, arXiv 2402.14740, eq. 9).

    Raises ValueError for an unknown estimator, when the shape is not [G, N] with N >= 1 (leave_one_out: N >= 2) or a
    reward is not finite.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if rewards.dim() != 2 or rewards.shape[1] < 1:
        raise ValueError(f"rewards must have shape [groups, group size], got {tuple(rewards.shape)}")
    if not bool(rewards.isfinite().all()):
        raise ValueError(f"rewards must be finite, {int((~rewards.isfinite()).sum())} are not")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    size = rewards.shape[1]
    match estimator:
        case "grpo":
            std = centred.square().mean(dim=1, keepdim=True).sqrt()
            advantages = centred / (std + epsilon)
        case "dr_grpo":
            advantages = centred
        case "leave_one_out":
            if size < 2:
                raise ValueError("leave_one_out needs at least two responses a group, got 1")
            advantages = centred * size / (size - 1)
        case _:
            raise ValueError(f"estimator={estimator!r} must be one of grpo, dr_grpo, leave_one_out")
    # The mean of equal numbers may differ from them by rounding, which a tiny std would blow up.
    constant = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(constant, 0.0, advantages)


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of each token by GAE, float64 [B, S], zero outside the mask.

    rewards: [B, S], received with a token; values: [B, S], of the state in which a token is chosen; mask: bool [B, S],
    the response tokens, outside of which nothing is read. Within a row, with t running over the tokens of the mask:

        delta_t = r_t + gamma * V_(t+1) - V_t          advantage_t = delta_t + gamma * lam * advantage_(t+1)

    and return_t = advantage_t + V_t. Behind the last token both V and the advantage are 0: a response ends there,
    also one that was cut off. Source: Schulman et al. 2016, arXiv 1506.02438, eq. 16.

    Raises ValueError for shapes that differ.
    """
    if not rewards.shape == values.shape == mask.shape or rewards.dim() != 2:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (rewards, values, mask))
        raise ValueError(f"rewards, values and mask must have one shape [B, S], got {shapes}")
    reward, value = (torch.where(mask, tensor.double(), 0.0) for tensor in (rewards, values))
    advantages = torch.zeros_like(value)
    later_value = torch.zeros_like(value[:, 0])
    later_advantage = torch.zeros_like(later_value)
    for t in reversed(range(mask.shape[1])):
        delta = reward[:, t] + gamma * later_value - value[:, t]
        advantage = delta + gamma * lam * later_advantage
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
        later_value = torch.where(mask[:, t], value[:, t], later_value)
        later_advantage = torch.where(mask[:, t], advantage, later_advantage)
    return advantages, advantages + value


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float | None:
    """1 - var(return - value) / var(return) over the tokens of mask bool [B, S], computed in float64: 1 for values that
    are the returns, 0 for values that say nothing, less for values that mislead. None for returns that are all equal.

    values, returns: [B, S].
    """
    target, error = returns[mask].double(), (returns - values)[mask].double()
    if bool((target == target[:1]).all()):
        return None
    return (1 - error.var(correction=0) / target.var(correction=0)).item()


def whiten(advantages: torch.Tensor, mask: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """(a - mean) / (std + epsilon) over the tokens of the mask, float64 [B, S], zero outside of it.

    advantages: [B], counted once for each token of their sequence, or [B, S]; mask: bool [B, S]. Mean and standard
    deviation (of the population) are those of all tokens of the iteration: call this once, before a batch is cut
    into updates.
    """
    wide = advantages.unsqueeze(1).expand_as(mask) if advantages.dim() == 1 else advantages
    tokens = wide[mask].double()
    centred = tokens - tokens.mean()
    result = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    result[mask] = centred / (centred.square().mean().sqrt() + epsilon)
    return result

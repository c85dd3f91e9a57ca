"""Correction of the difference between sampler and learner. Pure.

Tokens are drawn by the sampler and learned from by the learner, whose probability of the same token differs, by
numerics or because its weights are newer. With d = log p(learner, before the update) - log p(sampler), the
ratio of a token is exp(d). Its importance weight is a constant for the gradient:

    token       min(exp(d), cap)                           token TIS [1]
    sequence    min(exp(sum of d over the sequence), cap)  sequence TIS [2]
    off         1

Rejection gives weight 0:

    token_band      to a token whose ratio lies outside [low, high]; with weight=token and no cap: IcePop [3]
    sequence_band   to a sequence whose geometric mean ratio, exp(mean of d), lies outside [low, high] [2]
    veto            to a sequence of which any ratio is below the bound [2]

Bounds are inclusive. Rejected tokens stay in every denominator, of the loss and of statistics: see
`learner.aggregation`. Sequences are whole here; their sums are taken in float64.

Sources: [1] Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". [2] Liu et
al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch". [3] Ling Team
2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model", arXiv 2510.18855.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from learner.config import CorrectionConfig
from learner.kl import bounded


@dataclass(frozen=True, eq=False)
class Correction:
    """The weights of T tokens, row after row of the loss mask of B sequences, and why they are what they are.

    weight: float32 [T], 0 where rejected
    capped: bool [T], whose weight the cap made smaller (rejected or not)
    token_rejected: bool [T]; sequence_rejected, vetoed: bool [B]
    rows: int64 [T], the sequence of each token
    """

    weight: torch.Tensor
    capped: torch.Tensor
    token_rejected: torch.Tensor
    sequence_rejected: torch.Tensor
    vetoed: torch.Tensor
    rows: torch.Tensor

    @property
    def rejected(self) -> torch.Tensor:
        """bool [T], by whichever rule."""
        return self.token_rejected | (self.sequence_rejected | self.vetoed)[self.rows]

    def statistics(self) -> dict[str, float]:
        """Shares of the T tokens, or of the sequences that have one.

        weight_mean, weight_max: of the weights, rejected ones counting as 0. ess: effective sample size of the
        weights as a share of the tokens, (sum w)^2 / (T sum w^2) (Kish 1965), 0 if all are rejected. clipped:
        tokens with a capped weight. rejected: tokens with weight 0. token_rejected: tokens outside the
        token band. sequence_rejected, vetoed: sequences.

        Raises ValueError when there is no token.
        """
        if not len(self.weight):
            raise ValueError("there are no tokens whose weights could be described")
        weight = self.weight.double()
        squares = float(weight.square().sum())
        sequences = len(self.rows.unique())
        return {
            "weight_mean": float(weight.mean()),
            "weight_max": float(weight.max()),
            "ess": float(weight.sum()) ** 2 / (len(weight) * squares) if squares else 0.0,
            "clipped": _share(self.capped),
            "rejected": _share(self.rejected),
            "token_rejected": _share(self.token_rejected),
            "sequence_rejected": float(self.sequence_rejected.sum()) / sequences,
            "vetoed": float(self.vetoed.sum()) / sequences,
        }


def correct(
    old_logp: torch.Tensor, sampler_logp: torch.Tensor, mask: torch.Tensor, config: CorrectionConfig
) -> Correction:
    """Weights of the tokens in `mask`.

    old_logp, sampler_logp: float32 [B, S], never read outside mask bool [B, S]. A row is a whole sequence.
    """
    rows = mask.nonzero()[:, 0]
    d = (old_logp[mask] - sampler_logp[mask]).detach()
    count = mask.sum(1)
    total = torch.zeros(len(mask), dtype=torch.float64, device=d.device).index_add(0, rows, d.double())

    ratio = bounded(d).exp()
    match config.weight:
        case "token":
            weight = ratio
        case "sequence":
            weight = bounded(total).exp()[rows].float()
        case _:
            weight = torch.ones_like(ratio)
    capped = torch.zeros_like(weight, dtype=torch.bool)
    if config.cap is not None:
        capped = weight > config.cap
        weight = weight.clamp(max=config.cap)

    token_rejected = torch.zeros_like(capped)
    if config.token_band is not None:
        token_rejected = _outside(ratio, config.token_band)
    sequence_rejected = torch.zeros_like(count, dtype=torch.bool)
    if config.sequence_band is not None:
        mean = total / count.clamp(min=1)  # of a row without tokens: 0, which no band leaves out
        sequence_rejected = _outside(mean.exp(), config.sequence_band)
    vetoed = torch.zeros_like(count, dtype=torch.bool)
    if config.veto is not None:
        below = (d < math.log(config.veto)).long()
        vetoed = torch.zeros_like(count).index_add(0, rows, below) > 0

    correction = Correction(weight, capped, token_rejected, sequence_rejected, vetoed, rows)
    return replace(correction, weight=torch.where(correction.rejected, 0.0, weight))


def _outside(ratio: torch.Tensor, band: tuple[float, float]) -> torch.Tensor:
    low, high = band
    return (ratio < low) | (ratio > high)


def _share(flags: torch.Tensor) -> float:
    return float(flags.sum()) / len(flags)

"""From values of tokens to a loss. Pure.

The values v of the tokens in the loss mask become

    token_mean      sum over tokens / tokens in the loss mask        every token counts alike
    sequence_mean   sum over sequences of their token means / sequences with a token in the loss mask
    dr_grpo         sum over tokens / (sequences x longest possible response), a constant

where every count is over the whole mini-batch: all that goes into one optimiser step. Then neither the cut
into micro-batches nor padding nor order changes a loss. A token that is in the loss mask counts in the
denominators, even if it is given weight 0 later: rejecting a token takes its gradient away and makes no other
token weigh more.

Sources: token mean, DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.3); sequence mean, GRPO (Shao et al.
2024, arXiv 2402.03300, eq. 3); constant, Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2).
"""

from __future__ import annotations

import torch

from learner.batch import Totals
from learner.config import ObjectiveConfig


def aggregate(
    values: torch.Tensor, mask: torch.Tensor, totals: Totals, config: ObjectiveConfig
) -> torch.Tensor:
    """The share of whole sequences in the aggregate over a mini-batch: a 0-dimensional tensor.

    values: [T], those of the tokens in mask bool [B, S], row after row; totals: of the whole mini-batch.
    """
    match config.loss_aggregation:
        case "token_mean":
            return values.sum() / totals.tokens
        case "sequence_mean":
            lengths = mask.sum(1).unsqueeze(1).expand_as(mask)[mask]
            return (values / lengths).sum() / totals.sequences
        case "dr_grpo":
            assert config.max_response_tokens is not None  # a rule of ObjectiveConfig
            return values.sum() / (totals.rows * config.max_response_tokens)
    raise ValueError(f"loss_aggregation={config.loss_aggregation!r} is unknown")

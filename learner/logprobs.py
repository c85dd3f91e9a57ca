"""Log-probabilities of given tokens from hidden states, in FP32, without all the logits at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    hidden: torch.Tensor,
    output_weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    logits_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each id, and entropy, of softmax(hidden @ output_weight.T / temperature).

    hidden: [N, H] and output_weight: [V, H] of any float type, widened to FP32 before the product; ids:
    int64 [N]. Works on chunks of rows whose FP32 logits take at most `logits_bytes` (at least one row);
    when there are several, backward computes each chunk's logits anew. Returns float32 [N] twice; the
    entropy (in nats) carries no gradient. Raises ValueError unless the temperature is positive and finite.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    rows = max(1, logits_bytes // (4 * output_weight.shape[0]))
    weight = output_weight.float()
    if len(ids) <= rows:
        return _chunk(hidden, weight, ids, temperature)
    chunks = zip(hidden.split(rows), ids.split(rows), strict=True)
    parts = [
        checkpoint(_chunk, part, weight, wanted, temperature, use_reentrant=False, preserve_rng_state=False)
        for part, wanted in chunks
    ]
    logp, entropy = zip(*parts, strict=True)
    return torch.cat(logp), torch.cat(entropy)


def _chunk(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = F.log_softmax(hidden.float() @ weight.T / temperature, dim=-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(1, ids.unsqueeze(1)).squeeze(1), entropy

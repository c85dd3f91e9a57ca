"""Log-probabilities of given tokens from hidden states, in FP32, without all the logits at once.

The distribution is that from which a sampler with the same temperature and top-p draws: softmax(logits /
temperature), cut to its nucleus, the smallest set of likeliest tokens whose probability reaches top-p (Holtzman
et al. 2020, arXiv 1904.09751), and made to sum to one again. The nucleus is computed as vLLM does, rounding included.

Sampler and learner differ, so a token that the sampler drew may lie outside the learner's nucleus. It was possible,
so it is counted in: its probability is that in the nucleus with this one token added. That keeps it finite, and about
what it is just inside the nucleus; the alternative, probability 0, would drop unlikely tokens from learning because of
noise. How often it happens is returned. Which tokens belong to the nucleus is a constant for the gradient.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels.strict.output import OutputLayer
from learner.output_layer import scored_tokens
from learner.widened import widened_product


class TokenScores(NamedTuple):
    """Of N tokens: logp float32 [N]; entropy float32 [N] of the distribution, in nats; outside_nucleus bool [N],
    whether the token was added to the nucleus.
    """

    logp: torch.Tensor
    entropy: torch.Tensor
    outside_nucleus: torch.Tensor


class VocabularyPart(Protocol):
    """One of `parts` equal parts of the vocabulary, number `index`. Whoever has the others calls the same at the same
    time, and goes on with the same values: so what comes back hands its gradient on as it is.
    """

    index: int
    parts: int

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V / parts] -> [N, V]"""
        ...

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over the parts, of a value for each of N tokens."""
        ...

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Likewise, without a gradient."""
        ...


def token_scores(
    hidden: torch.Tensor,
    output_weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float,
    top_p: float,
    logits_bytes: int,
    entropy_gradient: bool = False,
    part: VocabularyPart | None = None,
    strict: OutputLayer | None = None,
) -> TokenScores:
    """Scores of `ids` under the logits hidden @ output_weight.T.

    hidden: [N, H] and output_weight: [V, H] of any float type, widened to FP32 before the product; ids: int64 [N].
    part: which rows of the whole output weight these are; None: all.
    strict: the sampler's very operations, for top_p 1 and the whole output weight.

    Works on chunks of rows whose FP32 logits take at most `logits_bytes` (at least one row); when there are several,
    backward computes each chunk's logits anew. The entropy carries a gradient only
    with `entropy_gradient`. Raises ValueError unless the temperature is positive and finite and top_p in (0, 1], and
    for a lower top_p, or a part of the vocabulary, under a strict spec.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if strict is not None and (top_p < 1 or part is not None):
        raise ValueError(f"a strict spec has neither a nucleus (top_p={top_p}) nor a part of the vocabulary")
    parts = 1 if part is None or top_p == 1 else part.parts  # which a nucleus needs together
    rows = max(1, logits_bytes // (4 * parts * output_weight.shape[0]))
    plain = part is None and strict is None and top_p == 1
    if plain and hidden.is_cuda and hidden.dtype is output_weight.dtype is torch.bfloat16:
        found = scored_tokens(hidden, output_weight, ids, temperature, rows, entropy_gradient)
        return TokenScores(*found, torch.zeros_like(ids, dtype=torch.bool))
    weight = output_weight.float() if strict is None else output_weight
    narrow = output_weight.detach() if output_weight.dtype is torch.bfloat16 else None
    settings = (narrow, temperature, top_p, entropy_gradient, part, strict)
    if len(ids) <= rows:
        return _chunk(hidden, weight, ids, *settings)
    chunks = zip(hidden.split(rows), ids.split(rows), strict=True)
    scored = [
        checkpoint(_chunk, states, weight, wanted, *settings, use_reentrant=False, preserve_rng_state=False)
        for states, wanted in chunks
    ]
    return TokenScores(*(torch.cat(column) for column in zip(*scored, strict=True)))


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    narrow: torch.Tensor | None,
    temperature: float,
    top_p: float,
    entropy_gradient: bool,
    part: VocabularyPart | None,
    strict: OutputLayer | None,
) -> TokenScores:
    if strict is not None:
        logits = strict.logits(hidden, weight)
        distribution = strict.log_softmax(logits, torch.full_like(logits[:, 0], temperature))
        return _scores(distribution, ids, torch.zeros_like(ids, dtype=torch.bool), None, entropy_gradient)
    logits = widened_product(hidden, weight, narrow) / temperature
    if part is None:
        return score_logits(logits, ids, top_p, entropy_gradient)
    if top_p < 1:
        return score_logits(part.gather(logits), ids, top_p, entropy_gradient)
    return _score_part(logits, ids, part, entropy_gradient)


def _score_part(
    logits: torch.Tensor, ids: torch.Tensor, part: VocabularyPart, entropy_gradient: bool
) -> TokenScores:
    """As `score_logits` with top_p 1, where these logits [N, V / parts] are a part of all."""
    shifted = logits - part.max(logits.detach().amax(-1))[:, None]
    total = part.sum(shifted.exp().sum(-1))
    log_total = total.log()
    here = ids - part.index * logits.shape[1]
    own = (here >= 0) & (here < logits.shape[1])
    chosen = shifted.gather(1, here.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    logp = part.sum(torch.where(own, chosen, 0.0)) - log_total
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # Values of all parts meet in sums alone: what each part made of `total` would have but a part of its gradient.
        entropy = log_total - part.sum((shifted.exp() * shifted).sum(-1)) / total
    return TokenScores(logp, entropy, torch.zeros_like(own))


def score_logits(
    logits: torch.Tensor, ids: torch.Tensor, top_p: float, entropy_gradient: bool = False
) -> TokenScores:
    """Scores of ids int64 [N] under logits [N, V], already divided by the temperature, of any float type."""
    outside = torch.zeros_like(ids, dtype=torch.bool)
    kept = None
    if top_p < 1:
        kept = nucleus(logits.detach(), top_p)
        outside = ~kept.gather(1, ids.unsqueeze(1)).squeeze(1)
        kept.scatter_(1, ids.unsqueeze(1), True)
        logits = logits.masked_fill(~kept, -torch.inf)
    return _scores(F.log_softmax(logits, dim=-1), ids, outside, kept, entropy_gradient)


def _scores(
    distribution: torch.Tensor,
    ids: torch.Tensor,
    outside: torch.Tensor,
    kept: torch.Tensor | None,
    entropy_gradient: bool,
) -> TokenScores:
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # 0 in place of -inf where the probability is 0: their product must be 0.
        surprise = distribution if kept is None else distribution.masked_fill(~kept, 0.0)
        entropy = -(distribution.exp() * surprise).sum(-1)
    return TokenScores(-F.nll_loss(distribution, ids, reduction="none"), entropy, outside)


def nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """bool like logits [N, V]: the likeliest tokens of each row whose probability first reaches top_p.

    As vLLM does it: from the least likely on, tokens are left out while their probabilities sum to no more than
    1 - top_p; the likeliest always stays.
    """
    ascending, order = logits.sort(dim=-1)  # among equals, this very sort decides for the sampler, too
    left_out = _running_sums(ascending.softmax(-1)) <= 1 - ascending.new_tensor(top_p)
    left_out[:, -1] = False
    return torch.zeros_like(left_out).scatter_(-1, order, ~left_out)


def _running_sums(values: torch.Tensor) -> torch.Tensor:
    """`cumsum` of each row of [N, V]. On a GPU torch refuses it where algorithms must be deterministic, since a single
    row may be summed in any order; of several rows each is summed by one block of threads, in a fixed order.
    """
    if not values.is_cuda or not torch.are_deterministic_algorithms_enabled():
        return values.cumsum(-1)
    several = torch.cat((values, values)) if len(values) == 1 else values
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return several.cumsum(-1)[: len(values)]
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)

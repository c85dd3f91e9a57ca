"""Batches for tests of the pure mathematics."""

from __future__ import annotations

import torch

from learner.batch import TrainBatch


def make_batch(
    mask: torch.Tensor,
    old: torch.Tensor,
    sampler: torch.Tensor,
    advantages: torch.Tensor,
    reference: torch.Tensor | None = None,
) -> TrainBatch:
    """From [B, S] tensors of response tokens; a prompt token is put in front of each row. advantages: [B]."""
    parts = [mask, sampler, old] + ([] if reference is None else [reference])
    mask, sampler, old, *rest = (torch.nn.functional.pad(part, (1, 0)) for part in parts)
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    lengths = torch.full((len(mask),), mask.shape[1])
    return TrainBatch(
        tokens, lengths, mask, sampler, old, advantages, reference_logp=rest[0] if rest else None
    )


def random_batch(rows: int = 7, width: int = 9, seed: int = 0, per_token: bool = False) -> TrainBatch:
    """Responses of different lengths, prompts of one token, ratios far enough apart that every bound is met. The
    last row has no token in the loss.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)
    lengths[0] = width
    positions = torch.arange(width)
    mask = (positions >= 1) & (positions < lengths[:, None])
    mask[-1] = False
    shape = (rows, width)
    old = -3 * torch.rand(shape, generator=generator)
    sampler = old + 0.6 * torch.randn(shape, generator=generator)
    reference = old + 0.6 * torch.randn(shape, generator=generator)
    advantages = torch.randn(shape if per_token else (rows,), generator=generator)
    tokens = torch.zeros(shape, dtype=torch.int64)
    return TrainBatch(tokens, lengths, mask, sampler, old, advantages, reference_logp=reference)


def random_logp(batch: TrainBatch, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """New log-probabilities and entropies, float64 [B, S], both with a gradient."""
    generator = torch.Generator().manual_seed(seed)
    new = batch.old_logp.double() + 0.6 * torch.randn(
        batch.old_logp.shape, generator=generator, dtype=torch.float64
    )
    entropy = torch.rand(batch.old_logp.shape, generator=generator, dtype=torch.float64)
    return new.requires_grad_(), entropy.requires_grad_()

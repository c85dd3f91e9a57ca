"""A short supervised start on demonstrations, so that reinforcement learning finds some reward to begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rl.config.model import WarmStartConfig

_WARM_UP_STEPS = 50
_FINAL_SHARE = 0.05

Demonstration = tuple[list[int], list[int]]  # token ids of the prompt and of the answer (with its end token)


def warm_start(
    learner: Any,
    demonstrations: Callable[[range, float], list[Demonstration]],
    config: WarmStartConfig,
    progress: Callable[[int, float], None],
) -> None:
    """Supervised steps on demonstrations number 0, 1, ...; the loss counts answer tokens only.

    The learning rate rises linearly over 50 steps and falls linearly to 5 % of ``config.lr``. `demonstrations` takes
    numbers and the share of right answers; `progress(step, loss)` is called after every step.
    """
    for step in range(config.steps):
        numbers = range(step * config.batch_size, (step + 1) * config.batch_size)
        batch = supervised_batch(demonstrations(numbers, config.correct_share))
        rising = min(1.0, (step + 1) / _WARM_UP_STEPS)
        falling = max(_FINAL_SHARE, 1 - step / config.steps)
        progress(step + 1, learner.supervised_step(*batch, lr=config.lr * rising * falling))


def supervised_batch(
    demonstrations: Sequence[Demonstration],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens int64 [B, S] right-padded, lengths int64 [B], loss_mask bool [B, S] (True at answer tokens)."""
    sequences = [torch.tensor(prompt + answer) for prompt, answer in demonstrations]
    tokens = pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    prompts = torch.tensor([len(prompt) for prompt, _ in demonstrations])
    positions = torch.arange(tokens.shape[1])
    return tokens, lengths, (positions >= prompts[:, None]) & (positions < lengths[:, None])

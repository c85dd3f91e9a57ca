"""The critic of PPO: a value function with a model, an optimiser and a learning rate of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels.precision_map import PrecisionMap
from learner.batch import Totals, TrainBatch
from learner.config import CriticConfig, LearnerConfig
from learner.model import ValueModel
from learner.trainable import Part, Trainable
from learner.value_loss import value_loss


class Critic(Trainable):
    """V(state) of the state in which a token is chosen: what reward is still to come.

    It begins as the policy in `model_dir`, its output layer replaced by a linear head of zeros: every value is 0
    before the first update. Its experts run under the precision map, as the policy's do. `config`, its learning
    rate times `critic.lr_factor`, is that of its optimiser. See `Trainable` for what it raises.

    A model of its own, rather than a head on the policy's, costs the memory of one but leaves the policy's gradient
    alone: no coefficient weighs the two losses, and nothing the critic learns changes what is sent to samplers.
    """

    model_class = ValueModel
    left_out = frozenset({"lm_head.weight"})
    model: ValueModel

    def __init__(
        self,
        model_dir: str | Path,
        precision_map: PrecisionMap,
        config: LearnerConfig,
        critic: CriticConfig,
        seed: int,
    ) -> None:
        super().__init__(model_dir, precision_map, replace(config, lr=critic.lr_factor * config.lr), seed)
        self.critic = critic

    def values(self, tokens: torch.Tensor, lengths: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        """float32 [B, S] on the CPU: at position t the value of the state before token t; zero outside `loss_mask`.

        tokens: int64 [B, S], right-padded; lengths: int64 [B]; loss_mask: bool [B, S]. Raises ValueError for inputs
        that do not fit together and when a value that is not finite reaches a quantiser, FloatingPointError when a
        value is not finite.
        """
        self._check_sequences(tokens, lengths, loss_mask)
        values = torch.zeros(tokens.shape, dtype=torch.float32)

        def keep(states: torch.Tensor, part: Part, rows: torch.Tensor) -> None:
            found = self._values(states, part.loss_mask)
            if self.ranks.speaks:
                values[rows, : found.shape[1]] = found.cpu()

        self._each(tokens, lengths, loss_mask, keep)
        return self.ranks.merge(values)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One optimiser step over the whole mini-batch on the clipped loss of `learner.value_loss`.

        batch: with old_values and returns. Returns `loss`, `grad_norm` (before clipping), `lr`, `tokens`, and means
        over the tokens in the loss mask of what `value_loss` sums. Raises as `Policy.update` does, and ValueError for
        a batch without values and returns.
        """
        if batch.old_values is None or batch.returns is None:
            raise ValueError("a critic learns from old_values and returns, which the batch does not have")

        def loss(
            states: torch.Tensor, part: TrainBatch, totals: Totals
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            assert part.old_values is not None and part.returns is not None
            values = self._values(states, part.loss_mask)
            return value_loss(
                values, part.old_values, part.returns, part.loss_mask, totals.tokens, self.critic
            )

        return self._step(batch, loss)

    def _values(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """float32 [B, S], zero outside the mask; states: [N, H], those before the tokens in it."""
        head = self.model.value_head
        values = F.linear(states.float(), head.weight, head.bias).squeeze(1)
        self._finite.watch(values, "values of the critic")
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

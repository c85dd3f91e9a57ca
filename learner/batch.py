"""Batches of sequences, what a learner says of them, and the one rule by which they are cut into micro-batches.

Free of Megatron: who only calls a learner in another process takes these from here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class Totals:
    """Counts over a whole mini-batch (all that goes into one optimiser step), by which losses are divided.

    tokens: in the loss mask; sequences: with a token in the loss mask; rows: all sequences.
    """

    tokens: int
    sequences: int
    rows: int


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """Sequences to learn from. Position t of a [B, S] tensor carries the value of token t.

    tokens: int64 [B, S], right-padded
    lengths: int64 [B], tokens of each sequence without padding
    loss_mask: bool [B, S], True at response tokens
    sampler_logp: float32 [B, S], log-probability under the engine and weights that sampled the token
    old_logp: float32 [B, S], log-probability under the learner before the update
    advantages: float32 [B], one for each sequence, or [B, S], one for each token
    reference_logp: float32 [B, S], log-probability under the reference policy; None without one
    old_values, returns: float32 [B, S], values under the critic before the update and what they should be; None
        without a critic
    routes: int16 [B, S, layers, k], the experts to take (see `learner.replay`); None: those of the routers

    What a [B, S] tensor of numbers holds where `loss_mask` is False never matters. Raises ValueError when the
    parts do not fit together.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    loss_mask: torch.Tensor
    sampler_logp: torch.Tensor
    old_logp: torch.Tensor
    advantages: torch.Tensor
    reference_logp: torch.Tensor | None = None
    old_values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    routes: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_sequences(self.tokens, self.lengths, self.loss_mask)
        for name in ("sampler_logp", "old_logp"):
            _check(name, getattr(self, name), self.tokens.shape, torch.float32)
        per_token = self.advantages.dim() == 2
        shape = self.tokens.shape if per_token else self.lengths.shape
        _check("advantages", self.advantages, shape, torch.float32)
        for name in ("reference_logp", "old_values", "returns"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), self.tokens.shape, torch.float32)
        if self.routes is not None:
            shape = torch.Size([*self.tokens.shape, *self.routes.shape[2:]])
            _check("routes", self.routes, shape, torch.int16)

    @property
    def totals(self) -> Totals:
        """The counts by which losses are divided when this is the whole mini-batch."""
        mask = self.loss_mask
        return Totals(tokens=int(mask.sum()), sequences=int(mask.any(1).sum()), rows=len(mask))

    def in_loss(self, name: str) -> torch.Tensor:
        """The field `name` at the tokens of the loss mask, row after row: [T]."""
        values = getattr(self, name)
        if values.dim() == 1:
            values = values.unsqueeze(1).expand_as(self.loss_mask)
        return values[self.loss_mask]

    def select(self, rows: torch.Tensor) -> TrainBatch:
        """The sequences `rows` (int64 [R]), padded no further than the longest of them."""
        width = int(self.lengths[rows].max())
        parts = {name: tensor[rows] for name, tensor in self._tensors().items()}
        return TrainBatch(**{k: v[:, :width] if v.dim() > 1 else v for k, v in parts.items()})

    def micro_batches(self, max_tokens: int) -> list[TrainBatch]:
        """Cut by `cut`."""
        return [self.select(rows) for rows in cut(self.lengths, max_tokens)]

    def to(self, device: torch.device) -> TrainBatch:
        """The same batch with every tensor on `device`."""
        return replace(self, **{name: moved(tensor, device) for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, torch.Tensor]:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}


@dataclass(frozen=True, eq=False)
class Scores:
    """[B, S] on the CPU; position t belongs to token t; zero, or False, where the loss mask is False.

    logp: float32, natural logarithm. entropy: float32, in nats, of the distribution from which token t was drawn.
    outside_nucleus: bool, whether the learner would not have drawn token t under top-p (see `learner.logprobs`).
    routes: int16 [B, S, layers, k], the experts that the routers themselves chose, whatever was replayed, if they were
        asked for; NO_ROUTE in padding.
    """

    logp: torch.Tensor
    entropy: torch.Tensor
    outside_nucleus: torch.Tensor
    routes: torch.Tensor | None = None


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On `device`. To a GPU by way of pinned memory: a copy from any other waits for all that the GPU has to do."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def cut(lengths: torch.Tensor, max_tokens: int) -> list[torch.Tensor]:
    """Rows (int64) of each micro-batch, of at most `max_tokens` tokens together, padding not counted.

    First fit decreasing: longest first, ties in the given order, each into the first micro-batch that has room. Raises
    ValueError when a single sequence is longer than `max_tokens`.
    """
    order = torch.sort(lengths, descending=True, stable=True)
    groups: list[list[int]] = []
    room: list[int] = []
    for row, length in zip(order.indices.tolist(), order.values.tolist(), strict=True):
        if length > max_tokens:
            raise ValueError(
                f"a sequence of {length} tokens does not fit into micro_batch_tokens={max_tokens}"
            )
        found = next((number for number, left in enumerate(room) if left >= length), len(groups))
        if found == len(groups):
            groups.append([])
            room.append(max_tokens)
        groups[found].append(row)
        room[found] -= length
    return [torch.tensor(group) for group in groups]


def check_sequences(tokens: torch.Tensor, lengths: torch.Tensor, loss_mask: torch.Tensor) -> None:
    """Raises ValueError unless tokens int64 [B, S], lengths int64 [B] in [1, S] and loss_mask bool [B, S] fit
    together: a token in the mask lies within its sequence and is not its first, which nothing predicts. Values are
    looked at on the CPU alone.
    """
    if tokens.dim() != 2 or len(tokens) == 0:
        raise ValueError(f"tokens must have shape [B, S] with at least one row, got {tuple(tokens.shape)}")
    _check("tokens", tokens, tokens.shape, torch.int64)
    _check("lengths", lengths, tokens.shape[:1], torch.int64)
    _check("loss_mask", loss_mask, tokens.shape, torch.bool)
    width = tokens.shape[1]
    # A part of what was checked on the CPU: to look at values would be to wait for the device.
    if tokens.is_cuda:
        return
    if bool(((lengths < 1) | (lengths > width)).any()):
        raise ValueError(f"lengths must lie in [1, {width}], got {lengths.tolist()}")
    positions = torch.arange(width, device=tokens.device)
    if bool((loss_mask & (positions >= lengths.unsqueeze(1))).any()):
        raise ValueError("loss_mask is True beyond the length of a sequence")
    if bool(loss_mask[:, :1].any()):
        raise ValueError("loss_mask is True at the first token of a sequence, which nothing predicts")


def _check(name: str, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {tuple(shape)}, got {tensor.dtype} {tuple(tensor.shape)}")

"""What a policy and a critic have in common: a Megatron model from a model folder, and optimiser steps on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from kernels.guard import check_guards
from kernels.precision_map import PrecisionMap
from learner import checkpoint, convert
from learner.batch import Totals, TrainBatch, check_sequences
from learner.config import LearnerConfig
from learner.data_parallel import DataParallel
from learner.families.architecture import Architecture
from learner.families.registry import family_of
from learner.folders import read_config, read_state
from learner.mapping import rules
from learner.model import Trunk
from learner.optimizer import Optimizer
from learner.packing import Packing
from learner.runtime import deterministic, start

# (micro-batch, counts of the whole mini-batch) -> the micro-batch's share of the loss, and sums over its tokens
LossOf = Callable[[TrainBatch, Totals], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Trainable:
    """A Megatron-core model whose expert layers run under a precision map, with its optimiser.

    model_dir: a Hugging Face folder of a supported family. seed: of torch's generator in this process.

    The same calls on the same machine give the same bits. Loss and gradient do not depend on how a batch is cut
    into micro-batches or shared out over data-parallel ranks, up to the rounding of FP32 sums.

    Raises FileNotFoundError for a folder without a model, and ValueError for a model that this package
    cannot hold, for weights that do not fit it, and for a precision map that does not fit it.
    """

    model_class: ClassVar[type[Trunk]]
    model: Trunk

    def __init__(
        self, model_dir: str | Path, precision_map: PrecisionMap, config: LearnerConfig, seed: int
    ) -> None:
        self.model_dir = Path(model_dir)
        self.precision_map = precision_map
        self.config = config
        self.hf_config = read_config(self.model_dir)
        family = family_of(self.hf_config)
        self.architecture = family.read(self.hf_config)
        check_precision_map(precision_map, self.architecture)
        self.device = start(config)
        self.ranks = DataParallel(self.device)
        torch.manual_seed(seed)

        model = self.model_class(self.architecture, precision_map, getattr(torch, config.dtype))
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.rules = [rule for rule in rules(family, self.architecture) if rule.megatron in shapes]
        weights = self._initial_weights(read_state(self.model_dir), shapes)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        self.model = model.to(self.device)

    @cached_property
    def optimizer(self) -> Optimizer:
        """Made when it is first needed: a model that only scores holds no FP32 masters and no moments."""
        return Optimizer(self.model.named_parameters(), self.config)

    @property
    def steps(self) -> int:
        """Optimiser steps taken since the model folder was loaded, over all restored runs."""
        return self.optimizer.steps

    def checkpoint(self, folder: str | Path) -> None:
        """Write weights, optimiser, step count and generator state into a new folder."""
        checkpoint.save(Path(folder), self.model, self.optimizer, self._identity())

    def restore(self, folder: str | Path) -> None:
        """Go on from `checkpoint`, bit for bit. Raises ValueError when it belongs to another model or map."""
        checkpoint.load(Path(folder), self.model, self.optimizer, self._identity())

    def _initial_weights(
        self, state: dict[str, torch.Tensor], shapes: Mapping[str, torch.Size]
    ) -> dict[str, torch.Tensor]:
        """A value for each parameter. state: the tensors of the model folder; shapes: of the parameters."""
        return convert.to_megatron(state, self.rules, shapes)

    def _step(self, batch: TrainBatch, loss_of: LossOf, lr: float | None = None) -> dict[str, float]:
        """One optimiser step over the whole mini-batch, of which `batch` holds this rank's rows.

        Returns the loss, what `loss_of` sums divided by the tokens in the loss mask, `grad_norm` (before clipping),
        `lr` and `tokens`, all of the whole mini-batch.
        """
        with self.ranks.together():
            _check_finite_inputs(batch)
            self._check_sequences(batch.tokens, batch.lengths, batch.loss_mask)
        totals = self.ranks.sum_totals(batch.totals)
        if totals.tokens == 0:
            raise ValueError("the batch has no token in its loss mask")
        sums: defaultdict[str, float] = defaultdict(float)
        self.optimizer.zero_grad()
        with deterministic():
            with self.ranks.together(), self._guarded():
                for part in batch.micro_batches(self.config.micro_batch_tokens):
                    loss, found = loss_of(part.to(self.device), totals)
                    if not torch.isfinite(loss):
                        raise FloatingPointError(
                            f"the loss of a micro-batch is {loss.item()}; no weight was changed"
                        )
                    loss.backward()
                    sums["loss"] += loss.item()
                    for name, value in found.items():
                        sums[name] += value.item() / totals.tokens
            self.ranks.sum_gradients(self.optimizer.masters.values())
            grad_norm, used_lr = self.optimizer.step(lr)
        metrics = self.ranks.sum_metrics(sums)
        return {**metrics, "grad_norm": grad_norm, "lr": used_lr, "tokens": float(totals.tokens)}

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around work of the experts, before its results are used. An error that values which reached a quantiser
        led to is replaced by the one that names layer and expert.
        """
        try:
            yield
        finally:
            check_guards(experts.guard for experts in self.model.experts())

    def _hidden_before(
        self, tokens: torch.Tensor, packing: Packing, mask: torch.Tensor, routes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[N, H]: for each of N tokens of mask bool [B, S], row after row, the state in which it was chosen.

        tokens: int64 [B, S]; routes: int16 [B, S, layers, k], the experts to take (see `learner.replay`).
        """
        packed_routes = None if routes is None else packing.pack(routes)
        return self.model.hidden_states(packing.pack(tokens), packing, packed_routes)[packing.before(mask)]

    def _check_sequences(self, tokens: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor) -> None:
        check_sequences(tokens, lengths, mask)
        longest, limit = int(lengths.max()), self.architecture.max_positions
        if longest > limit:
            raise ValueError(f"a sequence has {longest} tokens, the model has {limit} positions")
        vocab = self.architecture.vocab
        if bool(((tokens < 0) | (tokens >= vocab)).any()):
            raise ValueError(
                f"tokens must lie in [0, {vocab}), got {int(tokens.min())} to {int(tokens.max())}"
            )

    def _identity(self) -> dict[str, object]:
        return {
            "architecture": asdict(self.architecture),
            "dtype": self.config.dtype,
            "precision_map": self.precision_map.fingerprint,
        }


def check_precision_map(precision_map: PrecisionMap, architecture: Architecture) -> None:
    """Raise ValueError unless the map has a spec for each layer and the specs fit the model's widths."""
    if len(precision_map.layers) != architecture.layers:
        raise ValueError(
            f"the precision map has {len(precision_map.layers)} layers, the model has {architecture.layers}"
        )
    widths = {"hidden size": architecture.hidden, "expert width": architecture.expert_ffn}
    for layer, spec in enumerate(precision_map.layers):
        for name, width in widths.items():
            if width % spec.width_multiple:
                raise ValueError(
                    f"layer {layer} runs under {spec.name!r}: {spec.width_multiple} must divide the {name},"
                    f" got {width}"
                )


def _check_finite_inputs(batch: TrainBatch) -> None:
    for name in ("old_logp", "sampler_logp", "advantages", "reference_logp", "old_values", "returns"):
        if getattr(batch, name) is None:
            continue
        values = batch.in_loss(name)
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise FloatingPointError(f"{bad} of {values.numel()} values of {name} in the loss are not finite")

"""What a policy and a critic have in common: a Megatron model from a model folder, and optimiser steps on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from kernels.guard import check_guards
from kernels.precision_map import PrecisionMap
from learner import checkpoint, convert, dense, schedule
from learner.batch import Totals, TrainBatch, check_sequences, moved
from learner.config import LearnerConfig
from learner.families.architecture import Architecture
from learner.families.registry import family_of
from learner.finite import FiniteChecks
from learner.folders import FolderState, read_config
from learner.layout import Layout
from learner.mapping import parameter_shapes, rules
from learner.model import Trunk
from learner.optimizer import Optimizer
from learner.packing import Packing
from learner.ranks import Ranks, Replicas
from learner.runtime import deterministic, start

# (states [N, H] before the tokens in the loss mask, micro-batch, counts of the whole mini-batch) -> the micro-batch's
# share of the loss, and sums over its tokens
LossOf = Callable[[torch.Tensor, TrainBatch, Totals], tuple[torch.Tensor, dict[str, torch.Tensor]]]
# The same, and the rows of the mini-batch that the micro-batch is -> what is kept of them
Keep = Callable[[torch.Tensor, "Part", torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class Part:
    """A micro-batch on the model's device: tokens int64 and loss_mask bool [B, S], routes int16 [B, S, layers, k]."""

    tokens: torch.Tensor
    packing: Packing
    loss_mask: torch.Tensor
    routes: torch.Tensor | None = None


class Trainable:
    """A Megatron-core model whose expert layers run under a precision map, with its optimiser.

    model_dir: a Hugging Face folder of a supported family. seed: of torch's generator in this process.

    Where processes share the model (`learner.layout`), each has one of these and makes the same calls with the same
    arguments; all get the same results. The same calls on the same machine give the same bits. Loss and gradient do not
    depend on how a batch is cut into micro-batches or on the layout, up to the rounding of FP32 sums.

    Raises FileNotFoundError for a folder without a model, and ValueError for a model that this package
    cannot hold, for weights that do not fit it, and for a precision map or a layout that does not fit it.
    """

    model_class: ClassVar[type[Trunk]]
    left_out: ClassVar[frozenset[str]] = frozenset()  # tensors of the model folder that it has no use for
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
        layout = Layout.of(config)
        problems = list(layout.problems(self.architecture))
        if precision_map.model is not None and layout.tensor > 1:
            problems.append(
                f"a strict spec adds up whole rows: tensor_parallel={layout.tensor}, which cuts them, must be 1"
            )
        if problems:
            raise ValueError("; ".join(problems))
        self.device = start(config)
        copied = self.model_class.has_output_layer and self.architecture.tied_embeddings
        self.ranks = Ranks(layout.place(dist.get_rank()), self.architecture, self.device, copied)
        torch.manual_seed(seed)

        self.rules = [
            rule for rule in rules(family, self.architecture) if not self.left_out.intersection(rule.hf)
        ]
        self.shapes = {
            rule.megatron: parameter_shapes(self.architecture)[rule.megatron] for rule in self.rules
        }
        dtype = getattr(torch, config.dtype)
        parts = (self.ranks.place, dense.choose(self.device, config.transformer_engine))
        model = self.model_class(self.architecture, precision_map, dtype, *parts, config.recompute)
        self._load(model, FolderState(self.model_dir, self.left_out))
        self.model = model.to(self.device)
        self._finite = FiniteChecks()

    @cached_property
    def optimizer(self) -> Optimizer:
        """Made when it is first needed: a model that only scores holds no FP32 masters and no moments."""
        replicas = None
        if self.ranks.count > 1:
            place = self.ranks.place

            def replicas(name: str) -> Replicas:
                return self.ranks.replicas(place.global_name(name, self.architecture))

        return Optimizer(self.model.named_parameters(), self.config, replicas)

    @property
    def steps(self) -> int:
        """Optimiser steps taken since the model folder was loaded, over all restored runs."""
        return self.optimizer.steps

    def checkpoint(self, folder: str | Path) -> None:
        """Write weights, optimiser, step count and generator state into a new folder."""
        checkpoint.save(Path(folder), self._checkpointed())

    def restore(self, folder: str | Path) -> None:
        """Go on from `checkpoint`, which may have been written under another layout; under the same one bit for bit.

        Raises ValueError when it belongs to another model or map.
        """
        checkpoint.load(Path(folder), self._checkpointed())

    def _checkpointed(self) -> checkpoint.State:
        parts = (self.model, self.optimizer, self.ranks, self.architecture)
        return checkpoint.State(*parts, self._identity())

    def _load(self, model: Trunk, state: FolderState) -> None:
        """Every parameter from the model folder, this process's block of it; else zero."""
        convert.check_fits(state, self.rules, self.shapes)
        by_name = {rule.megatron: rule for rule in self.rules}
        place = self.ranks.place
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole_name = place.global_name(name, self.architecture)
                if whole_name in by_name:
                    box = place.box(whole_name, tuple(parameter.shape))
                    parameter.copy_(convert.block_of(state, by_name[whole_name], box))
                else:
                    parameter.zero_()

    def _step(self, batch: TrainBatch, loss_of: LossOf, lr: float | None = None) -> dict[str, float]:
        """One optimiser step over the whole mini-batch.

        Returns the loss, what `loss_of` sums divided by the tokens in the loss mask, `grad_norm` (before clipping),
        `lr` and `tokens`.
        """
        with self.ranks.together():
            _check_finite_inputs(batch)
            self._check_sequences(batch.tokens, batch.lengths, batch.loss_mask)
        totals = batch.totals
        if totals.tokens == 0:
            raise ValueError("the batch has no token in its loss mask")
        passes = self.ranks.passes(batch.lengths, self.config.micro_batch_tokens)
        parts: dict[int, tuple[TrainBatch, Packing]] = {}  # those under way
        sums: dict[str, torch.Tensor] = {}  # float64, on the device

        def forward(number: int) -> torch.Tensor:
            part = batch.select(passes[number].rows)
            if passes[number].idle:
                part = replace(part, loss_mask=torch.zeros_like(part.loss_mask))
            packing, part = Packing.of(part.lengths, self.device), part.to(self.device)
            parts[number] = part, packing
            return self._hidden(Part(part.tokens, packing, part.loss_mask, part.routes))

        def finish(number: int, hidden: torch.Tensor) -> torch.Tensor:
            part, packing = parts.pop(number)
            loss, found = loss_of(packing.states_before(hidden, part.loss_mask), part, totals)
            self._finite.watch(loss, "losses of a micro-batch")
            for name, value in {"loss": loss.double() * totals.tokens, **found}.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()
            return loss

        self.optimizer.zero_grad()
        with deterministic():
            with self._lockstep():
                schedule.run(self.model, len(passes), forward, finish, train=True)
            self.optimizer.reduce()
            grad_norm, used_lr = self.optimizer.step(lr)
        metrics = self.ranks.sum_metrics({name: total.item() / totals.tokens for name, total in sums.items()})
        return {**metrics, "grad_norm": grad_norm, "lr": used_lr, "tokens": float(totals.tokens)}

    def _each(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        loss_mask: torch.Tensor,
        keep: Keep,
        routes: torch.Tensor | None = None,
        see: Callable[[Part, torch.Tensor], None] | None = None,
    ) -> None:
        """Without a gradient, `keep` of the states before the tokens in the loss mask of each micro-batch, on the last
        stage; `see` is called after every forward pass, with the micro-batch's rows. Neither is for idle passes.
        """
        passes = self.ranks.passes(lengths, self.config.micro_batch_tokens)
        parts: dict[int, Part] = {}

        def forward(number: int) -> torch.Tensor:
            rows = passes[number].rows
            width = int(lengths[rows].max())
            chosen = (tokens[rows, :width], loss_mask[rows, :width])
            own_tokens, mask = (moved(tensor, self.device) for tensor in chosen)
            replay = None if routes is None else moved(routes[rows, :width], self.device)
            part = Part(own_tokens, Packing.of(lengths[rows], self.device), mask, replay)
            hidden = self._hidden(part)
            parts[number] = part
            if see is not None and not passes[number].idle:
                see(part, rows)
            return hidden

        def finish(number: int, hidden: torch.Tensor) -> torch.Tensor:
            part = parts.pop(number)
            if not passes[number].idle:
                keep(part.packing.states_before(hidden, part.loss_mask), part, passes[number].rows)
            return hidden

        with torch.no_grad(), deterministic(), self._lockstep():
            schedule.run(self.model, len(passes), forward, finish, train=False)

    @contextmanager
    def _lockstep(self) -> Iterator[None]:
        """Around passes through the model. Values that are not finite are reported at the end, as the ranks wait for
        each other in every layer; an error on any rank stops all.
        """
        self._finite.clear()
        with self.ranks.together(), self._guarded():
            yield
            self._finite.check()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around work of the experts, before its results are used. An error that values which reached a quantiser
        led to is replaced by the one that names layer and expert.
        """
        try:
            yield
        finally:
            check_guards(experts.guard for experts in self.model.experts())

    def _hidden(self, part: Part) -> torch.Tensor:
        """[T, H]: the state after each packed token; before the last pipeline stage, what goes to the next."""
        packing = part.packing
        routes = None if part.routes is None else packing.pack(part.routes)
        return self.model.hidden_states(packing.pack(part.tokens), packing, routes)

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

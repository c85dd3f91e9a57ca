"""The policy under training: scores sequences, learns from them, and gives its weights away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kernels.experts import wire_name
from kernels.guard import check_guards
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from kernels.routing import NO_ROUTE
from learner import checkpoint, convert
from learner.batch import Totals, TrainBatch, check_sequences, cut
from learner.config import LearnerConfig, ObjectiveConfig
from learner.families.architecture import Architecture
from learner.families.registry import family_of
from learner.folders import carry_from, read_config, read_state, write_model
from learner.logprobs import TokenScores, token_scores
from learner.mapping import is_expert, rules
from learner.model import PolicyModel
from learner.objective import negative_log_likelihood, policy_loss
from learner.optimizer import Optimizer
from learner.replay import check_routes, own_routes
from learner.runtime import deterministic, start


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


LossOf = Callable[
    [TrainBatch, torch.Tensor, torch.Tensor, Totals], tuple[torch.Tensor, dict[str, torch.Tensor]]
]


class Policy:
    """A Megatron-core model whose expert layers run under a precision map, with its optimiser.

    model_dir: a Hugging Face folder of a supported family. seed: of torch's generator in this process.

    Log-probabilities are FP32 and of the distribution softmax(logits / temperature), cut to its nucleus by
    top_p. The same calls on the same machine give the same bits. Loss and gradient do not depend on how a
    batch is cut into micro-batches, up to the rounding of FP32 sums.

    Raises FileNotFoundError for a folder without a model, and ValueError for a model that this package
    cannot hold, for weights that do not fit it, and for a precision map that does not fit it.
    """

    def __init__(
        self, model_dir: str | Path, precision_map: PrecisionMap, config: LearnerConfig, seed: int
    ) -> None:
        self.model_dir = Path(model_dir)
        self.precision_map = precision_map
        self.config = config
        self.hf_config = read_config(self.model_dir)
        family = family_of(self.hf_config)
        self.architecture = family.read(self.hf_config)
        _check_precision_map(precision_map, self.architecture)
        self.device = start(config)
        torch.manual_seed(seed)

        self.rules = rules(family, self.architecture)
        model = PolicyModel(self.architecture, precision_map, getattr(torch, config.dtype))
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        weights = convert.to_megatron(read_state(self.model_dir), self.rules, shapes)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        self.model = model.to(self.device)
        self.optimizer = Optimizer(self.model.named_parameters(), config)

    def score(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        loss_mask: torch.Tensor,
        temperature: float,
        top_p: float = 1.0,
        *,
        routes: torch.Tensor | None = None,
        return_routes: bool = False,
    ) -> Scores:
        """Log-probabilities and entropies at the tokens in `loss_mask`.

        tokens: int64 [B, S], right-padded; lengths: int64 [B]; loss_mask: bool [B, S]; routes: int16 [B, S, layers,
        k], the experts to take (see `learner.replay`). Raises ValueError
        for inputs that do not fit together and when a value that is not finite reaches a quantiser (naming layer
        and expert), FloatingPointError when a log-probability is not finite.
        """
        self._check_sequences(tokens, lengths, loss_mask)
        self._check_routes(tokens, routes)
        own = torch.full(self._routes_shape(tokens), NO_ROUTE, dtype=torch.int16) if return_routes else None
        logp = torch.zeros(tokens.shape, dtype=torch.float32)
        entropy = torch.zeros_like(logp)
        outside = torch.zeros_like(loss_mask)
        with torch.no_grad(), deterministic(), self._guarded():
            for rows in cut(lengths, self.config.micro_batch_tokens):
                width = int(lengths[rows].max())
                parts = (tokens[rows, :width].to(self.device), loss_mask[rows, :width].to(self.device))
                replay = None if routes is None else routes[rows, :width].to(self.device)
                scored = self._token_scores(*parts, temperature, top_p, routes=replay)
                if own is not None:
                    chosen = own_routes(self.model.route_replays(), len(rows)).cpu()
                    padding = torch.arange(width) >= lengths[rows, None]
                    own[rows, :width] = chosen.masked_fill(padding[..., None, None], NO_ROUTE)
                for whole, part in zip((logp, entropy, outside), scored, strict=True):
                    whole[rows, :width] = part.cpu()
        return Scores(logp, entropy, outside, own)

    def update(
        self, batch: TrainBatch, objective: ObjectiveConfig, temperature: float, top_p: float = 1.0
    ) -> dict[str, float]:
        """One optimiser step over the whole mini-batch, with the clipped objective of `learner.objective`.

        temperature, top_p: those with which the tokens were sampled. Returns `loss`,
        `grad_norm` (before clipping), `lr`, `tokens`, and means over the tokens in the loss mask: `entropy`
        and what `policy_loss` sums. Raises ValueError for a batch without response tokens or without what the
        objective needs, for an objective with a critic, and when a value that is not finite reaches a quantiser;
        FloatingPointError when an input, a log-probability, the loss or the gradient is not finite; no weight has
        changed then.
        """
        if objective.critic is not None:
            raise ValueError("objective.critic is set, and this learner has no value function")
        _check_finite_inputs(batch)

        def loss(
            part: TrainBatch, logp: torch.Tensor, entropy: torch.Tensor, totals: Totals
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return policy_loss(part, logp, entropy, totals, objective)

        return self._step(
            batch, loss, temperature, top_p, entropy_gradient=objective.entropy_coefficient != 0
        )

    def supervised_step(
        self, tokens: torch.Tensor, lengths: torch.Tensor, loss_mask: torch.Tensor, lr: float | None = None
    ) -> float:
        """One optimiser step on the mean negative log-likelihood of the tokens in `loss_mask`, which it
        returns.

        `lr` replaces the scheduled learning rate. Raises as `update` does.
        """
        unused = torch.zeros(tokens.shape, dtype=torch.float32)
        batch = TrainBatch(tokens, lengths, loss_mask, unused, unused, unused[:, 0])

        def loss(
            part: TrainBatch, logp: torch.Tensor, entropy: torch.Tensor, totals: Totals
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return negative_log_likelihood(logp, part.loss_mask, totals.tokens), {}

        return self._step(batch, loss, lr=lr)["loss"]

    def export(self, precision_map: PrecisionMap | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by the name under which it travels to a sampler.

        Tensors outside the experts carry their Hugging Face checkpoint names, in the model's type; a tied
        output layer is left out. Expert tensors carry `kernels.experts.wire_name`: the very ones that the
        forward pass uses, or, in layers where the sampler's `precision_map` asks for another spec, the
        masters under that spec. All are views where possible: valid until the next update.
        """
        target = precision_map or self.precision_map
        _check_precision_map(target, self.architecture)
        outside = [rule for rule in self.rules if not is_expert(rule.megatron)]
        yield from convert.to_hf(self._state(), outside)
        for layer, experts in enumerate(self.model.experts()):
            for part, tensor in experts.quantized(target.spec_for(layer)).tensors().items():
                yield wire_name(layer, part), tensor

    def save_hf(self, folder: str | Path) -> None:
        """Write a model folder that transformers loads: weights in the model's type, tokenizer files
        carried over.

        Raises FileExistsError when `folder` holds something.
        """
        state = dict(convert.to_hf(self._state(), self.rules))
        write_model(Path(folder), self.hf_config, state, carry_from(self.model_dir))

    def checkpoint(self, folder: str | Path) -> None:
        """Write weights, optimiser, step count and generator state into a new folder."""
        checkpoint.save(Path(folder), self.model, self.optimizer, self._identity())

    def restore(self, folder: str | Path) -> None:
        """Go on from `checkpoint`, bit for bit. Raises ValueError when it belongs to another model or map."""
        checkpoint.load(Path(folder), self.model, self.optimizer, self._identity())

    def report(self) -> EngineReport:
        experts = self.model.experts()
        return EngineReport(
            engine="megatron",
            precision_map=self.precision_map,
            backend="reference",
            expert_layers=len(experts),
            expert_calls=sum(layer.calls for layer in experts),
        )

    @property
    def steps(self) -> int:
        """Optimiser steps taken since the model folder was loaded, over all restored runs."""
        return self.optimizer.steps

    def _step(
        self,
        batch: TrainBatch,
        loss_of: LossOf,
        temperature: float = 1.0,
        top_p: float = 1.0,
        lr: float | None = None,
        entropy_gradient: bool = False,
    ) -> dict[str, float]:
        self._check_sequences(batch.tokens, batch.lengths, batch.loss_mask)
        self._check_routes(batch.tokens, batch.routes)
        totals = batch.totals
        if totals.tokens == 0:
            raise ValueError("the batch has no token in its loss mask")
        metrics: defaultdict[str, float] = defaultdict(float)
        self.optimizer.zero_grad()
        with deterministic():
            with self._guarded():
                for part in batch.micro_batches(self.config.micro_batch_tokens):
                    part = part.to(self.device)
                    scored = self._token_scores(
                        part.tokens, part.loss_mask, temperature, top_p, entropy_gradient, part.routes
                    )
                    loss, sums = loss_of(part, scored.logp, scored.entropy, totals)
                    if not torch.isfinite(loss):
                        raise FloatingPointError(
                            f"the loss of a micro-batch is {loss.item()}; no weight was changed"
                        )
                    loss.backward()
                    metrics["loss"] += loss.item()
                    for name, value in (sums | {"entropy": scored.entropy.sum()}).items():
                        metrics[name] += value.item() / totals.tokens
            grad_norm, used_lr = self.optimizer.step(lr)
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

    def _token_scores(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        temperature: float,
        top_p: float,
        entropy_gradient: bool = False,
        routes: torch.Tensor | None = None,
    ) -> TokenScores:
        """Scores [B, S], zero outside the mask. Logits exist at masked-in tokens only."""
        rows, positions = mask.nonzero(as_tuple=True)
        hidden = self.model.hidden_states(tokens, routes)[positions - 1, rows]
        scored = token_scores(
            hidden,
            self.model.output_weight,
            tokens[rows, positions],
            temperature=temperature,
            top_p=top_p,
            logits_bytes=self.config.logits_bytes,
            entropy_gradient=entropy_gradient,
        )
        bad = int((~torch.isfinite(scored.logp)).sum())
        if bad:
            raise FloatingPointError(f"{bad} of {len(scored.logp)} log-probabilities are not finite")
        return TokenScores(
            *(part.new_zeros(mask.shape).index_put((rows, positions), part) for part in scored)
        )

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

    def _routes_shape(self, tokens: torch.Tensor) -> tuple[int, ...]:
        return (*tokens.shape, self.architecture.layers, self.architecture.experts_per_token)

    def _check_routes(self, tokens: torch.Tensor, routes: torch.Tensor | None) -> None:
        if routes is not None:
            check_routes(routes, self.architecture.experts, self._routes_shape(tokens))

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _identity(self) -> dict[str, object]:
        return {
            "architecture": asdict(self.architecture),
            "dtype": self.config.dtype,
            "precision_map": self.precision_map.fingerprint,
        }


def _check_precision_map(precision_map: PrecisionMap, architecture: Architecture) -> None:
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
    for name in ("old_logp", "sampler_logp", "advantages", "reference_logp"):
        if getattr(batch, name) is None:
            continue
        values = batch.in_loss(name)
        bad = int((~torch.isfinite(values)).sum())
        if bad:
            raise FloatingPointError(f"{bad} of {values.numel()} values of {name} in the loss are not finite")

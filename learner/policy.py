"""The policy under training: scores sequences, learns from them, and gives its weights away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.experts import derived_name, expert_layout, wire_name
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport, names
from kernels.routing import NO_ROUTE
from learner import convert
from learner.batch import Totals, TrainBatch, cut
from learner.config import ObjectiveConfig
from learner.folders import carry_from, write_model
from learner.logprobs import TokenScores, token_scores
from learner.mapping import is_expert
from learner.model import PolicyModel
from learner.objective import negative_log_likelihood, policy_loss
from learner.packing import Packing
from learner.replay import check_routes, own_routes, take_load
from learner.runtime import deterministic
from learner.trainable import Trainable, check_precision_map


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


class Policy(Trainable):
    """The model that samples, as the learner holds it; see `Trainable` for what it is made from and what it raises.

    Log-probabilities are FP32 and of the distribution softmax(logits / temperature), cut to its nucleus by
    top_p.
    """

    model_class = PolicyModel
    model: PolicyModel

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
                packing = Packing.of(lengths[rows].to(self.device))
                parts = (
                    tokens[rows, :width].to(self.device),
                    packing,
                    loss_mask[rows, :width].to(self.device),
                )
                replay = None if routes is None else routes[rows, :width].to(self.device)
                scored = self._token_scores(*parts, temperature, top_p, routes=replay)
                if own is not None:
                    own[rows, :width] = packing.unpack(own_routes(self.model.route_replays()), NO_ROUTE).cpu()
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
        objective needs, and when a value that is not finite reaches a quantiser; FloatingPointError when an input, a
        log-probability, the loss or the gradient is not finite; no weight has changed then.
        """
        entropy_gradient = objective.entropy_coefficient != 0

        def loss(part: TrainBatch, totals: Totals) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            scored = self._token_scores(
                part.tokens,
                Packing.of(part.lengths),
                part.loss_mask,
                temperature,
                top_p,
                entropy_gradient,
                part.routes,
            )
            loss, sums = policy_loss(part, scored.logp, scored.entropy, totals, objective)
            return loss, sums | {"entropy": scored.entropy.sum()}

        with self.ranks.together():
            self._check_routes(batch.tokens, batch.routes)
        return self._step(batch, loss)

    def supervised_step(
        self, tokens: torch.Tensor, lengths: torch.Tensor, loss_mask: torch.Tensor, lr: float | None = None
    ) -> float:
        """One optimiser step on the mean negative log-likelihood of the tokens in `loss_mask`, which it
        returns.

        `lr` replaces the scheduled learning rate. Raises as `update` does.
        """
        unused = torch.zeros(tokens.shape, dtype=torch.float32)
        batch = TrainBatch(tokens, lengths, loss_mask, unused, unused, unused[:, 0])

        def loss(part: TrainBatch, totals: Totals) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            packing = Packing.of(part.lengths)
            logp = self._token_scores(part.tokens, packing, part.loss_mask, temperature=1.0, top_p=1.0).logp
            return negative_log_likelihood(logp, part.loss_mask, totals.tokens), {}

        return self._step(batch, loss, lr)["loss"]

    def export(self, precision_map: PrecisionMap | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by the name under which it travels to a sampler.

        Tensors outside the experts carry their Hugging Face checkpoint names, in the model's type; a tied
        output layer is left out. Expert tensors carry `kernels.experts.wire_name`: the very ones that the
        forward pass uses, or, in layers where the sampler's `precision_map` asks for another spec, the
        masters under that spec. All are views where possible: valid until the next update.
        """
        target = precision_map or self.precision_map
        check_precision_map(target, self.architecture)
        outside = [rule for rule in self.rules if not is_expert(rule.megatron)]
        yield from convert.to_hf(self._state(), outside)
        for layer, experts in enumerate(self.model.experts()):
            for part, tensor in experts.quantized(target.spec_for(layer)).tensors().items():
                yield wire_name(layer, part), tensor

    def export_layout(
        self, precision_map: PrecisionMap | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of everything that `export` gives, in its order; nothing is computed."""
        target = precision_map or self.precision_map
        check_precision_map(target, self.architecture)
        state = self._state()
        outside = [rule for rule in self.rules if not is_expert(rule.megatron)]
        shapes = convert.hf_shapes(outside, {name: tensor.shape for name, tensor in state.items()})
        types = {name: state[rule.megatron].dtype for rule in outside for name in rule.hf}
        layout = {name: (tuple(shape), types[name]) for name, shape in shapes.items()}
        for layer, experts in enumerate(self.model.experts()):
            count, hidden, ffn = experts.weight2.shape
            parts = expert_layout(count, hidden, ffn, target.spec_for(layer))
            layout |= {wire_name(layer, part): entry for part, entry in parts.items()}
        return layout

    def export_operands(
        self, precision_map: PrecisionMap | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As `export`, for an engine that quantises for itself: of the experts `Experts.operands`."""
        target = precision_map or self.precision_map
        outside = [rule for rule in self.rules if not is_expert(rule.megatron)]
        yield from convert.to_hf(self._state(), outside)
        for layer, experts in enumerate(self.model.experts()):
            for part, tensor in experts.operands(target.spec_for(layer)).items():
                yield wire_name(layer, part), tensor

    def export_derived(self, precision_map: PrecisionMap | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """What an engine derives from the exported tensors, by name; see `kernels.experts.derived_name`."""
        target = precision_map or self.precision_map
        for layer, experts in enumerate(self.model.experts()):
            for part, tensor in experts.derived(target.spec_for(layer)).items():
                yield derived_name(layer, part), tensor

    def expert_load(self) -> torch.Tensor | None:
        """int64 [layers, E]: tokens of this process that each expert got since this was last asked; None: of none."""
        return take_load(self.model.route_replays())

    def save_hf(self, folder: str | Path) -> None:
        """Write a model folder that transformers loads: weights in the model's type, tokenizer files
        carried over.

        Raises FileExistsError when `folder` holds something.
        """
        state = dict(convert.to_hf(self._state(), self.rules))
        write_model(Path(folder), self.hf_config, state, carry_from(self.model_dir))

    def report(self) -> EngineReport:
        experts = self.model.experts()
        return EngineReport(
            engine="megatron",
            precision_map=self.precision_map,
            backend=names(layer.backend for layer in experts),
            expert_layers=len(experts),
            expert_calls=sum(layer.calls for layer in experts),
        )

    def _token_scores(
        self,
        tokens: torch.Tensor,
        packing: Packing,
        mask: torch.Tensor,
        temperature: float,
        top_p: float,
        entropy_gradient: bool = False,
        routes: torch.Tensor | None = None,
    ) -> TokenScores:
        """Scores [B, S], zero outside the mask. Logits exist at masked-in tokens only."""
        scored = token_scores(
            self._hidden_before(tokens, packing, mask, routes),
            self.model.output_weight,
            tokens[mask],
            temperature=temperature,
            top_p=top_p,
            logits_bytes=self.config.logits_bytes,
            entropy_gradient=entropy_gradient,
        )
        bad = int((~torch.isfinite(scored.logp)).sum())
        if bad:
            raise FloatingPointError(f"{bad} of {len(scored.logp)} log-probabilities are not finite")
        return TokenScores(*(part.new_zeros(mask.shape).index_put((mask,), part) for part in scored))

    def _routes_shape(self, tokens: torch.Tensor) -> tuple[int, ...]:
        return (*tokens.shape, self.architecture.layers, self.architecture.experts_per_token)

    def _check_routes(self, tokens: torch.Tensor, routes: torch.Tensor | None) -> None:
        if routes is not None:
            check_routes(routes, self.architecture.experts, self._routes_shape(tokens))

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

"""The policy under training: scores sequences, learns from them, and gives its weights away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path

import torch

from kernels.experts import StoredLayout, derived_name, expert_layout, wire_name
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport, names
from kernels.routing import NO_ROUTE
from kernels.spec import ExecutionSpec
from learner import convert
from learner.batch import Scores, Totals, TrainBatch
from learner.config import ObjectiveConfig
from learner.folders import carry_from, write_model
from learner.logprobs import TokenScores, token_scores
from learner.mapping import Rule, is_expert
from learner.model import PolicyModel
from learner.moe import Experts
from learner.objective import negative_log_likelihood, policy_loss
from learner.replay import check_routes, own_routes, take_load
from learner.trainable import Part, Trainable, check_precision_map


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
        own = torch.zeros(self._routes_shape(tokens), dtype=torch.int32) if return_routes else None
        found: list[tuple[torch.Tensor, TokenScores]] = []

        def keep(states: torch.Tensor, part: Part, rows: torch.Tensor) -> None:
            scored = self._token_scores(states, part.tokens, part.loss_mask, temperature, top_p)
            if self.ranks.speaks:
                found.append((rows, scored))

        def see(part: Part, rows: torch.Tensor) -> None:
            assert own is not None
            # Raised by one, so that nothing is zero and parts from different ranks add up.
            chosen = part.packing.unpack(self._routes_here(part) + 1).int().cpu()
            layers = self.model.own_layers
            own[rows, : chosen.shape[1], layers.start : layers.stop] = chosen

        self._each(tokens, lengths, loss_mask, keep, routes, None if own is None else see)
        # Copied to the CPU once all is under way, as a copy waits for the device.
        logp = torch.zeros(tokens.shape, dtype=torch.float32)
        entropy, outside = torch.zeros_like(logp), torch.zeros(tokens.shape, dtype=torch.int32)
        for rows, scored in found:
            for whole, part in zip((logp, entropy, outside), scored, strict=True):
                whole[rows, : part.shape[1]] = part.to(whole.dtype).cpu()
        return Scores(
            self.ranks.merge(logp),
            self.ranks.merge(entropy),
            self.ranks.merge(outside).bool(),
            None if own is None else (self.ranks.merge(own) + NO_ROUTE).to(torch.int16),
        )

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

        def loss(
            states: torch.Tensor, part: TrainBatch, totals: Totals
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            scored = self._token_scores(
                states, part.tokens, part.loss_mask, temperature, top_p, entropy_gradient
            )
            loss, sums = policy_loss(part, scored.logp, scored.entropy, totals, objective)
            return loss, sums | {"entropy": scored.entropy.sum()}

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

        def loss(
            states: torch.Tensor, part: TrainBatch, totals: Totals
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            logp = self._token_scores(states, part.tokens, part.loss_mask, temperature=1.0, top_p=1.0).logp
            return negative_log_likelihood(logp, part.loss_mask, totals.tokens), {}

        return self._step(batch, loss, lr)["loss"]

    def export(
        self, precision_map: PrecisionMap | None = None, layout: StoredLayout = StoredLayout.ROWS
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by the name under which it travels to a sampler.

        Tensors outside the experts carry their Hugging Face checkpoint names, in the model's type; a tied
        output layer is left out. Expert tensors carry `kernels.experts.wire_name`: the very ones that the
        forward pass uses, or, in layers where the sampler's `precision_map` asks for another spec, the
        masters under that spec; in the sampler's `layout`. All are views where possible: valid until the next update.

        Where processes share the model, each iterates at the same time: experts are quantised by the rank that owns
        them, and rank 0 gets everything, as the others hand it over. These get the names, with empty tensors.
        """
        yield from self._export(precision_map, partial(Experts.stored, layout=layout))

    def export_layout(
        self, precision_map: PrecisionMap | None = None, layout: StoredLayout = StoredLayout.ROWS
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of everything that `export` gives, in its order; nothing is computed."""
        target = precision_map or self.precision_map
        check_precision_map(target, self.architecture)
        outside = [rule for rule in self.rules if not is_expert(rule.megatron)]
        dtype = getattr(torch, self.config.dtype)
        found = {name: (tuple(s), dtype) for name, s in convert.hf_shapes(outside, self.shapes).items()}
        for layer in range(self.architecture.layers):
            sizes = (self.architecture.experts, self.architecture.hidden, self.architecture.expert_ffn)
            parts = expert_layout(*sizes, target.spec_for(layer), layout)
            found |= {wire_name(layer, part): entry for part, entry in parts.items()}
        return found

    def export_operands(
        self, precision_map: PrecisionMap | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As `export`, for an engine that quantises for itself: of the experts `Experts.operands`."""
        yield from self._export(precision_map, Experts.operands)

    def export_derived(
        self, precision_map: PrecisionMap | None = None, layout: StoredLayout = StoredLayout.ROWS
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What an engine derives from the exported tensors, by name; see `kernels.experts.derived_name`."""
        target = precision_map or self.precision_map
        for layer in range(self.architecture.layers):
            for part, tensor in self._of_experts(layer, target, partial(Experts.derived, layout=layout)):
                yield derived_name(layer, part), tensor

    def expert_load(self) -> torch.Tensor | None:
        """int64 [layers, E]: tokens that each expert got since this was last asked; None: of none. Where processes
        share the model all come here, and what they passed for company counts too.
        """
        own = take_load(self.model.route_replays())
        if own is None:
            return None
        layers = self.model.own_layers
        load = own.new_zeros(self.architecture.layers, own.shape[1])
        load[layers.start : layers.stop] = own
        return self.ranks.merge(load)

    def save_hf(self, folder: str | Path) -> None:
        """Write a model folder that transformers loads: weights in the model's type, tokenizer files
        carried over. With several processes all come here, and rank 0 writes.

        Raises FileExistsError when `folder` holds something.
        """
        state = {
            name: tensor.cpu() if self.ranks.count > 1 else tensor
            for rule in self.rules
            for name, tensor in self._collected(rule)
        }
        with self.ranks.together():
            if self.ranks.place.rank == 0:
                write_model(Path(folder), self.hf_config, state, carry_from(self.model_dir))

    def _export(
        self,
        precision_map: PrecisionMap | None,
        parts_of: Callable[[Experts, ExecutionSpec], dict[str, torch.Tensor]],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        target = precision_map or self.precision_map
        check_precision_map(target, self.architecture)
        for rule in self.rules:
            if not is_expert(rule.megatron):
                yield from self._collected(rule)
        for layer in range(self.architecture.layers):
            for part, tensor in self._of_experts(layer, target, parts_of):
                yield wire_name(layer, part), tensor

    def _collected(self, rule: Rule) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0 the Hugging Face tensors of one rule."""

        def own() -> torch.Tensor:
            return self._own_parameters[rule.megatron].detach()

        dtype = getattr(torch, self.config.dtype)
        whole = self.ranks.collect(rule.megatron, own, self.shapes[rule.megatron], dtype)
        tensors = [torch.empty(0)] * len(rule.hf) if whole is None else rule.split(whole)
        yield from zip(rule.hf, tensors, strict=True)

    def _of_experts(
        self,
        layer: int,
        target: PrecisionMap,
        parts_of: Callable[[Experts, ExecutionSpec], dict[str, torch.Tensor]],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0 a part of all experts of a layer after the other, each made by the rank that owns an expert."""
        name = f"decoder.layers.{layer}.mlp.experts.weight1"
        holders = self.ranks.place.layout.first_holder(name, self.architecture)
        own: dict[str, torch.Tensor] = {}
        if self.ranks.place.rank in holders.values():
            experts = self.model.experts()[layer - self.model.own_layers.start]
            own = parts_of(experts, target.spec_for(layer))
        described = [(part, tensor.shape, tensor.dtype) for part, tensor in own.items()]
        for part, (count, *rest), dtype in self.ranks.tell(described, holders[0]):
            shape = (count * len(holders), *rest)  # experts come first, also where a part is flattened
            whole = self.ranks.collect(name, partial(own.__getitem__, part), shape, dtype)
            yield part, torch.empty(0) if whole is None else whole

    @cached_property
    def _own_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that this process holds, by their names in the whole model."""
        place = self.ranks.place
        named = self.model.named_parameters()
        return {place.global_name(name, self.architecture): parameter for name, parameter in named}

    def _routes_here(self, part: Part) -> torch.Tensor:
        """int16 [T, own layers, k]: what the routers chose; for tokens that other processes route, NO_ROUTE."""
        chosen = own_routes(self.model.route_replays())
        tokens = len(part.packing.sequences)
        here = self.model.own_tokens(tokens)
        result = chosen.new_full((tokens, *chosen.shape[1:]), NO_ROUTE)
        result[here] = chosen[: here.stop - here.start]
        return result

    def report(self) -> EngineReport:
        experts = self.model.experts()
        return EngineReport(
            engine="megatron",
            precision_map=self.precision_map,
            backend=names(layer.backend for layer in experts),
            expert_layers=self.architecture.layers,
            expert_calls=sum(layer.calls for layer in experts),
        )

    def _token_scores(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        temperature: float,
        top_p: float,
        entropy_gradient: bool = False,
    ) -> TokenScores:
        """Scores [B, S], zero outside the mask; states: [N, H], those before the tokens in it."""
        scored = token_scores(
            states,
            self.model.output_weight,
            tokens[mask],
            temperature=temperature,
            top_p=top_p,
            logits_bytes=self.config.logits_bytes,
            entropy_gradient=entropy_gradient,
            part=self.ranks.vocabulary,
            strict=self.model.strict_output,
        )
        self._finite.watch(scored.logp, "log-probabilities")
        return TokenScores(*(part.new_zeros(mask.shape).masked_scatter(mask, part) for part in scored))

    def _routes_shape(self, tokens: torch.Tensor) -> tuple[int, ...]:
        return (*tokens.shape, self.architecture.layers, self.architecture.experts_per_token)

    def _check_routes(self, tokens: torch.Tensor, routes: torch.Tensor | None) -> None:
        if routes is not None:
            if self.precision_map.model is not None:
                raise ValueError(
                    "routes cannot be given under a strict spec: both engines choose the same experts"
                )
            check_routes(routes, self.architecture.experts, self._routes_shape(tokens))

"""The MoE layer: Megatron's router, then the whole expert layer by `kernels` under its execution spec.

Megatron permutes tokens in its dispatcher and sums them there. Here permutation, both products, SwiGLU,
router coefficient and combination are one composition that the execution spec describes. So the dispatcher
leaves tokens where they are, and the experts see every token with its top-k slots. Where ranks share the experts out,
the experts send each slot to the rank that owns its expert (`learner.dispatch`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from kernels import backends
from kernels.experts import TORCH_TYPE, ExpertWeights, StoredLayout
from kernels.guard import NonFiniteGuard
from kernels.packed_rows import PackedRows
from kernels.quantizer_spec import Rounding
from kernels.slots import slot_spec
from kernels.spec import ExecutionSpec
from learner.dispatch import Pack, expert_parallel
from learner.megatron_api import (
    MegatronModule,
    MoELayer,
    MoESubmodules,
    MoETokenDispatcher,
    ProcessGroupCollection,
    TransformerConfig,
    get_default_pg_collection,
)


class InPlaceDispatcher(MoETokenDispatcher):
    """Keeps tokens where they are; `learner.router` has given experts and coefficients of each slot."""

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shape = tokens.shape
        self.topk_ids = routing_map
        return tokens.reshape(-1, tokens.shape[-1]), probs

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return hidden_states, self.topk_ids, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.view(self.shape)


class SpecifiedMoELayer(MoELayer):
    """Megatron's MoE layer with the in-place dispatcher."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, submodules, layer_number, groups)
        self.token_dispatcher = InPlaceDispatcher(config, groups)


class Experts(MegatronModule):
    """The experts of one layer that this rank owns: the master weights, and their quantised form once for each version
    of them.

    weight1: [E, 2F, H], gate rows then up rows; weight2: [E, H, F]; in the model's parameter type.
    guard: to be checked before anything that `forward` or its gradient computed is used.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        execution_spec: ExecutionSpec,
        layer: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.group = pg_collection.ep
        self.shared_out = self.group.size() > 1
        # What `forward` computes: the layer, or the slots of all ranks that are sent to these experts.
        self.computed_spec = slot_spec(execution_spec) if self.shared_out else execution_spec
        hidden, ffn, dtype = config.hidden_size, config.moe_ffn_hidden_size, config.params_dtype
        self.execution_spec = execution_spec
        self.weight1 = nn.Parameter(torch.empty(num_local_experts, 2 * ffn, hidden, dtype=dtype))
        self.weight2 = nn.Parameter(torch.empty(num_local_experts, hidden, ffn, dtype=dtype))
        first = self.group.rank() * num_local_experts
        self.guard = NonFiniteGuard(layer, num_local_experts, first)
        self.calls = 0  # of forward
        self._computed_by: str | None = None
        self._snapshot: tuple[tuple[int, ...], ExpertWeights, Any] | None = None

    def forward(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """[T, H], int64 [T, k], float32 [T, k] -> [T, H] of the same type, and no bias.

        Stochastic rounding in backward is seeded from torch's global generator, whose state a checkpoint holds.
        """
        self.calls += 1
        if not self.shared_out:
            return self._own(hidden_states, topk_ids, topk_weights), None
        spec, slots = self.execution_spec, (hidden_states, topk_ids, topk_weights)
        own, collect = (self._own, len(self.weight1)), self._kernels(spec).collect
        return expert_parallel(*slots, *own, spec, self.group, self._pack(), collect), None

    def _pack(self) -> Pack | None:
        """What packs rows for their way to other ranks; None where they go as they are (`learner.dispatch`)."""
        kernels, spec = self._kernels(self.computed_spec), self.computed_spec
        if torch.is_grad_enabled() or not kernels.packs(spec):
            return None
        assert kernels.pack_rows is not None
        return partial(kernels.pack_rows, spec=spec)

    def _own(
        self, hidden_states: torch.Tensor | PackedRows, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """The layer of the own experts, by whose numbers `topk_ids` names them."""
        kernels, spec, prepared = self._kernels(self.computed_spec), self.computed_spec, self._current()[1]
        if isinstance(hidden_states, PackedRows):
            return kernels.forward(hidden_states, topk_ids, topk_weights, prepared, spec, self.guard)
        return kernels.expert_layer(
            hidden_states,
            topk_ids,
            topk_weights,
            self.weight1,
            self.weight2,
            prepared,
            spec,
            guard=self.guard,
            seed=self._seed(),
        )

    def compute_under(self, spec: ExecutionSpec) -> None:
        """From here on `forward` computes under `spec`, with the same masters."""
        self.execution_spec = spec
        self.computed_spec = slot_spec(spec) if self.shared_out else spec
        self._snapshot = None

    def quantized(self, spec: ExecutionSpec) -> ExpertWeights:
        """The present weights under `spec`, in the layout of the back end: the very tensors that `forward` uses when
        it is the layer's own.
        """
        if spec == self.execution_spec:
            return self._current()[0]
        kernels = self._kernels(spec)
        return kernels.quantize(self.weight1, self.weight2, spec).in_layout(kernels.layout)

    def stored(
        self, spec: ExecutionSpec, layout: StoredLayout = StoredLayout.ROWS
    ) -> dict[str, torch.Tensor]:
        """The tensors of `quantized(spec)`, in another layout if that is asked for."""
        return self.quantized(spec).in_layout(layout).tensors()

    def derived(
        self, spec: ExecutionSpec, layout: StoredLayout = StoredLayout.ROWS
    ) -> dict[str, torch.Tensor]:
        """What an engine under `spec` derives from `stored(spec, layout)`: `derived` of what the back end prepares."""
        weights = self.quantized(spec)
        asked = weights.in_layout(layout)
        if asked is weights and spec == self.execution_spec:
            return self._current()[1].derived()
        return self._kernels(spec).prepare(asked, spec, compact=True).derived()

    def operands(self, spec: ExecutionSpec) -> dict[str, torch.Tensor]:
        """What `quantized(spec)` is made of: the masters in the spec's operand type, `w13.weight` and `w2.weight`."""
        dtype = TORCH_TYPE[spec.operand]
        return {"w13.weight": self.weight1.detach().to(dtype), "w2.weight": self.weight2.detach().to(dtype)}

    def forget_quantized(self) -> None:
        """Drop the quantised form and what the back end made of it, until they are needed again."""
        self._snapshot = None

    def _seed(self) -> int | None:
        gradient = self.execution_spec.gradient
        if gradient is None or gradient.rounding is not Rounding.STOCHASTIC or not torch.is_grad_enabled():
            return None
        return int(torch.randint(2**62, ()))

    @property
    def backend(self) -> str:
        """The name of what computes `forward`, also while the weights are elsewhere."""
        return self._computed_by or self._kernels(self.computed_spec).name

    def _kernels(self, spec: ExecutionSpec) -> backends.ExpertKernels:
        return backends.choose(spec, self.weight1.device)

    def _current(self) -> tuple[ExpertWeights, Any]:
        # Every in-place write raises a tensor's version, and moving a parameter changes its address. Writes
        # through `.data` would go unseen; nothing here makes any.
        masters = (self.weight1, self.weight2)
        version = tuple(number for w in masters for number in (w._version, w.data_ptr()))
        if self._snapshot is None or self._snapshot[0] != version:
            kernels = self._kernels(self.execution_spec)
            weights = kernels.quantize(*masters, self.execution_spec).in_layout(kernels.layout)
            computing = self._kernels(self.computed_spec)
            self._computed_by = computing.name
            prepared = computing.prepare(weights, self.computed_spec)
            self._snapshot = (version, weights, prepared)
        return self._snapshot[1:]

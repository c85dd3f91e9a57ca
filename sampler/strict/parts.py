"""What takes the place of vLLM's modules outside the experts; only attention has a file of its own.

`under` puts each under another model spec than it was made with.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from kernels.model_spec import ModelSpec
from kernels.strict.linear import Weight, linear
from kernels.strict.norm import rms_norm
from kernels.strict.output import OutputLayer
from kernels.strict.rotary import RotaryTable
from kernels.strict.router import route


class StrictLinearMethod(UnquantizedLinearMethod):
    """out: type of the output; None: the input's."""

    def __init__(self, model: ModelSpec, out: torch.dtype | None = None) -> None:
        super().__init__()
        self.form, self.out = Weight(), out
        self.under(model)

    def under(self, model: ModelSpec) -> None:
        self.rule = model.linear

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass  # vLLM would repack the weight and drop the original

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert bias is None
        return linear(x, layer.weight, self.form, self.rule, self.out)


class StrictRMSNorm(nn.Module):
    def __init__(self, weight: nn.Parameter, eps: float, model: ModelSpec) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        self.under(model)

    def under(self, model: ModelSpec) -> None:
        self.rule = model.norm

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of x; with a residual, that of their sum in the model's type, and the sum."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps, self.rule)
        total = residual + x
        return rms_norm(total, self.weight, self.eps, self.rule), total


class StrictRotary(nn.Module):
    def __init__(self, head_dim: int, theta: float, model: ModelSpec) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.table = RotaryTable(head_dim, theta, model.rotary)

    def under(self, model: ModelSpec) -> None:
        self.table.round_to(model.rotary)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T], and [T, heads * D] each."""
        by_head = (x.unflatten(-1, (-1, self.head_dim)) for x in (query, key))
        query, key = (self.table.rotate(x, positions).flatten(1) for x in by_head)
        return query, key


class StrictRouter(BaseRouter):
    """Experts by descending logit, ties to the lower id."""

    def __init__(self, own: BaseRouter, renormalize: bool, model: ModelSpec) -> None:
        super().__init__(own.top_k, own.global_num_experts)
        self.routing_method = own.routing_method_type
        self.renormalize = renormalize
        self.under(model)

    def under(self, model: ModelSpec) -> None:
        self.rule = model.router

    @property
    def routing_method_type(self):  # vLLM's enum
        return self.routing_method

    def _compute_routing(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, coefficients = route(router_logits.float(), self.top_k, self.renormalize, self.rule)
        return coefficients, ids


class StrictLogits(nn.Module):
    """vLLM's `LogitsProcessor`: the output layer in FP32, over the model's own vocabulary.

    temperature: to which logits are brought here already, for prompts' log-probabilities, which vLLM computes without.
    """

    def __init__(self, vocab: int, model: ModelSpec) -> None:
        super().__init__()
        self.vocab = vocab
        self.output = OutputLayer(model)
        self.temperature = 1.0

    def under(self, model: ModelSpec) -> None:
        self.output.model = model

    def forward(
        self,
        lm_head: ParallelLMHead,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert embedding_bias is None
        logits = self.output.logits(hidden_states, lm_head.weight)[:, : self.vocab]
        return logits / torch.full_like(logits[:, :1], self.temperature)

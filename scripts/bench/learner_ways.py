"""The expert layers that `learner_update.py` compares with the product's own, as back ends for CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from pipelines import SPEC, Bf16, Problem, Unfused
from torch.autograd.function import once_differentiable

from kernels.backends import ExpertKernels
from kernels.experts import ExpertWeights
from kernels.triton import layer
from kernels.triton.backward import Saved, expert_gradients

_PIPELINES: dict[str, Any] = {"bf16": Bf16, "naive": Unfused}


class _Layer(torch.autograd.Function):
    """Forward by a pipeline's steps, backward in BF16 from what they leave, as `kernels.triton.layer` does it."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, ids: Any, p: Any, w13: Any, w2: Any, prepared: Any, pipeline: Any
    ) -> torch.Tensor:
        operand = x.bfloat16()
        problem = Problem(operand, ids, p, operand, "")
        weights = SimpleNamespace(w13=w13.detach(), w2=w2.detach(), ours=prepared)
        groups, saved, output = pipeline(problem, weights).steps()
        ctx.save_for_backward(p, w13, w2, *saved)
        ctx.groups = groups
        return output.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p, w13, w2, *saved = ctx.saved_tensors
        found = expert_gradients(gradients[0], p, w13, w2, Saved(*saved), ctx.groups)
        return found.x, None, found.topk_weights, found.w13, found.w2, None, None


def kernels(way: str) -> ExpertKernels:
    """bf16: nothing is quantised. naive: weights as `minite` has them, activations with one scale a tensor."""
    pipeline = _PIPELINES[way]

    def expert_layer(
        x: Any, ids: Any, p: Any, w13: Any, w2: Any, prepared: Any, spec: Any, **_: Any
    ) -> torch.Tensor:
        return _Layer.apply(x, ids, p, w13, w2, prepared, pipeline)

    def no_forward(*_: Any) -> torch.Tensor:
        raise NotImplementedError("this back end is for updates")

    if way == "bf16":
        return ExpertKernels(
            way, ExpertWeights.quantize, lambda weights, spec: None, no_forward, expert_layer
        )
    return ExpertKernels(
        way, layer.quantize, lambda w, spec: layer.prepare(w, SPEC), no_forward, expert_layer
    )

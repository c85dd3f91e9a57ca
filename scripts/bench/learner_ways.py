"""The unfused expert layer that `learner_update.py` compares with the product's own, as a back end for CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from pipelines import SPEC, Problem, Unfused
from torch.autograd.function import once_differentiable

from kernels.backends import ExpertKernels
from kernels.triton import layer
from kernels.triton.backward import Saved, expert_gradients


class _Layer(torch.autograd.Function):
    """Forward by the pipeline's steps, backward in BF16 from what they leave, as `kernels.triton.layer` does it."""

    @staticmethod
    def forward(ctx: Any, x: Any, ids: Any, p: Any, w13: Any, w2: Any, prepared: Any) -> torch.Tensor:
        groups, saved, output = _steps(x, ids, p, w13, w2, prepared)
        ctx.save_for_backward(p, w13, w2, *saved)
        ctx.groups = groups
        return output.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p, w13, w2, *saved = ctx.saved_tensors
        found = expert_gradients(gradients[0], p, w13, w2, Saved(*saved), ctx.groups)
        return found.x, None, found.topk_weights, found.w13, found.w2, None


def _steps(x: Any, ids: Any, p: Any, w13: Any, w2: Any, prepared: Any) -> Any:
    operand = x.detach().bfloat16()
    weights = SimpleNamespace(w13=w13.detach(), w2=w2.detach(), ours=prepared)
    return Unfused(Problem(operand, ids, p.detach(), operand, ""), weights).steps()  # type: ignore[arg-type]


def _expert_layer(
    x: Any, ids: Any, p: Any, w13: Any, w2: Any, prepared: Any, spec: Any, **_: Any
) -> torch.Tensor:
    if torch.is_grad_enabled():
        return _Layer.apply(x, ids, p, w13, w2, prepared)
    return _steps(x, ids, p, w13, w2, prepared)[-1].to(x.dtype)


def _forward(*_: Any) -> torch.Tensor:
    raise NotImplementedError("this back end is for the learner")


UNFUSED = ExpertKernels(
    "unfused", layer.quantize, lambda weights, spec: layer.prepare(weights, SPEC), _forward, _expert_layer
)

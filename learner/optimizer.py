"""AdamW on FP32 master weights, with global gradient-norm clipping and linear warm-up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from learner.config import LearnerConfig


class Optimizer:
    """torch's AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) on the masters of named parameters.

    A float32 parameter is its own master. A parameter of another type gets a float32 master, which
    accumulates its gradient over micro-batches in float32 and from which it is rounded after each step.
    Weight decay is for matrices only.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: LearnerConfig) -> None:
        self.config = config
        self.steps = 0
        self.parameters = dict(parameters)
        self.masters = {name: _master(parameter) for name, parameter in self.parameters.items()}
        matrices = [master for master in self.masters.values() if master.dim() > 1]
        vectors = [master for master in self.masters.values() if master.dim() <= 1]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def step(self, lr: float | None = None) -> tuple[float, float]:
        """One update from the accumulated gradients, which are dropped; `lr` replaces the schedule.

        Returns the gradient norm before clipping and the learning rate used. Raises FloatingPointError,
        changing no weight, when a gradient is not finite.
        """
        lr = self.scheduled_lr() if lr is None else lr
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            culprits = self._non_finite()
            self.zero_grad()
            raise FloatingPointError(f"gradient norm is {norm.item()}; not finite: {culprits}")
        if self.config.grad_clip:
            nn.utils.clip_grads_with_norm_(self.masters.values(), self.config.grad_clip, norm)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        # The fused kernel writes without telling autograd, on whose version numbers caches of weights rely.
        torch.autograd.graph.increment_version(self.masters.values())
        self.zero_grad()
        self._round_masters()
        self.steps += 1
        return norm.item(), lr

    def scheduled_lr(self) -> float:
        """Learning rate of the next step: rises linearly over `warmup_steps`, then stays."""
        warmup = self.config.warmup_steps
        return self.config.lr * min(1.0, (self.steps + 1) / warmup) if warmup else self.config.lr

    def state(self) -> dict[str, torch.Tensor]:
        """AdamW's moments and step counts, and the masters that are not parameters, by parameter name."""
        state = {
            f"{name}/{key}": value
            for name, master in self.masters.items()
            for key, value in self.adamw.state[master].items()
        }
        separate = {n: m for n, m in self.masters.items() if m is not self.parameters[n]}
        return state | {f"{name}/master": master.detach() for name, master in separate.items()}

    def load_state(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """The inverse of `state`. The parameters themselves are restored elsewhere."""
        self.steps = steps
        self.adamw.state.clear()
        for key, value in state.items():
            name, part = key.rsplit("/", 1)
            master = self.masters[name]
            if part == "master":
                with torch.no_grad():
                    master.copy_(value)
            else:
                self.adamw.state[master][part] = value.to(master.device, copy=True)

    def _round_masters(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if parameter is not self.masters[name]:
                    parameter.copy_(self.masters[name])

    def _non_finite(self) -> str:
        counts = {
            name: int((~torch.isfinite(master.grad)).sum())
            for name, master in self.masters.items()
            if master.grad is not None
        }
        shown = [f"{name} ({count} elements)" for name, count in counts.items() if count]
        return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def accumulate(source: torch.Tensor) -> None:
        gradient = source.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        source.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)
    return master

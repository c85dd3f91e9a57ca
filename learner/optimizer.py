"""AdamW on FP32 master weights, with global gradient-norm clipping and linear warm-up.

Where several ranks hold the same parameter, each holds the master and the moments of an equal slice of it, flattened
(the distributed optimiser of Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, stage 1): gradients are summed straight
into slices, and the parameter is put together from the slices after the step, so that its bits are the same on all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from learner.config import LearnerConfig
from learner.ranks import Replicas


@dataclass(frozen=True)
class Slice:
    """Elements start to stop of a flattened parameter. padded: their number with the zeros that make slices equal."""

    start: int
    stop: int
    padded: int


class Optimizer:
    """torch's AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) on the masters of named parameters.

    A float32 parameter that this rank alone holds is its own master. Any other gets a float32 master, a slice of it if
    several ranks hold it; a gradient of another type is accumulated over micro-batches in float32. Weight decay is for
    matrices only.

    replicas: says for each name which ranks hold the parameter too; None for a process that is alone.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: LearnerConfig,
        replicas: Callable[[str], Replicas] | None = None,
    ) -> None:
        self.config = config
        self.steps = 0
        self.parameters = dict(parameters)
        self.replicas = {} if replicas is None else {name: replicas(name) for name in self.parameters}
        self.slices = {n: _slice(p, self.replicas[n]) for n, p in self.parameters.items() if self._shared(n)}
        self.gradients: dict[str, torch.Tensor] = {}  # float32, of this rank's rows; where not in `grad`
        self.masters = {name: self._master(name, parameter) for name, parameter in self.parameters.items()}
        decayed = {name for name, parameter in self.parameters.items() if parameter.dim() > 1}
        matrices = [master for name, master in self.masters.items() if name in decayed]
        vectors = [master for name, master in self.masters.items() if name not in decayed]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)
        self.gradients.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def reduce(self) -> None:
        """Sum gradients over the ranks that hold a parameter; then each master has the gradient of the mini-batch."""
        for name, replicas in self.replicas.items():
            parameter, master, own = self.parameters[name], self.masters[name], self.slices.get(name)
            gradient = self.gradients.pop(name, master.grad if own is None else parameter.grad)
            if gradient is None:
                gradient = torch.zeros_like(parameter, dtype=torch.float32)
            if replicas.copies is not None:
                dist.all_reduce(gradient, group=replicas.copies)
            if own is None:
                master.grad = gradient
                continue
            parameter.grad = None
            flat = F.pad(gradient.flatten(), (0, own.padded * replicas.count - gradient.numel()))
            master.grad = torch.empty_like(master)
            dist.reduce_scatter_tensor(master.grad, flat, group=replicas.group)

    def step(self, lr: float | None = None) -> tuple[float, float]:
        """One update from the reduced gradients, which are dropped; `lr` replaces the schedule.

        Returns the gradient norm before clipping and the learning rate used. Raises FloatingPointError, on every rank
        and changing no weight, when a gradient is not finite.
        """
        lr = self.scheduled_lr() if lr is None else lr
        norm = self._norm()
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
        """AdamW's moments and step counts, and masters of parameters of another type, as `name/part`: of this rank's
        slice, if there is one, without its padding.
        """
        state = {}
        for name, master in self.masters.items():
            parts = dict(self.adamw.state[master])
            if self.parameters[name].dtype != torch.float32:
                parts["master"] = master.detach()
            own = self.slices.get(name)
            for part, value in parts.items():
                sliced = own is not None and value.dim()
                state[f"{name}/{part}"] = value[: own.stop - own.start] if own and sliced else value
        return state

    def load_state(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """The inverse of `state`. The parameters themselves have been restored before."""
        self.steps = steps
        self.adamw.state.clear()
        with torch.no_grad():
            for name in self.slices:
                _fill(self.masters[name], self._sliced(name, self.parameters[name]))
            for key, value in state.items():
                name, part = key.rsplit("/", 1)
                master = self.masters[name]
                if part != "master":
                    like = torch.zeros_like(master) if value.dim() else value
                    self.adamw.state[master][part] = like.to(master.device, copy=True)
                if value.dim():
                    _fill(master if part == "master" else self.adamw.state[master][part], value)

    def whole(self, name: str, slice_: torch.Tensor) -> torch.Tensor:
        """A tensor like the parameter `name`, of which each rank that holds it gives its slice, padded."""
        if name not in self.slices:
            return slice_
        replicas, shape = self.replicas[name], self.parameters[name].shape
        flat = slice_.new_empty(slice_.numel() * replicas.count)
        dist.all_gather_into_tensor(flat, slice_.contiguous(), group=replicas.group)
        return flat[: shape.numel()].view(shape)

    def _shared(self, name: str) -> bool:
        return bool(self.replicas) and self.replicas[name].count > 1

    def _sliced(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        own = self.slices[name]
        return tensor.detach().flatten()[own.start : own.stop]

    def _master(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        own = self.slices.get(name)
        if own is None and parameter.dtype == torch.float32:
            return parameter
        if own is None:
            master = nn.Parameter(parameter.detach().float())
        else:
            master = nn.Parameter(parameter.new_zeros(own.padded, dtype=torch.float32))
            with torch.no_grad():
                _fill(master, self._sliced(name, parameter))
        if parameter.dtype != torch.float32:
            parameter.register_post_accumulate_grad_hook(self._accumulator(name, None if own else master))
        return master

    def _accumulator(self, name: str, master: nn.Parameter | None) -> Callable[[torch.Tensor], None]:
        """Adds a gradient up in float32: in that of the master, or, for a slice, in one of the whole parameter."""

        def accumulate(source: torch.Tensor) -> None:
            assert source.grad is not None
            gradient, source.grad = source.grad, None
            total = _added(self.gradients.get(name) if master is None else master.grad, gradient)
            if master is None:
                self.gradients[name] = total
            else:
                master.grad = total

        return accumulate

    def _norm(self) -> torch.Tensor:
        """The L2 norm of the whole gradient, each element counted once."""
        if not self.replicas:
            return nn.utils.get_total_norm([m.grad for m in self.masters.values() if m.grad is not None])
        counted = [m.grad for name, m in self.masters.items() if self.replicas[name].counted]
        own = nn.utils.get_total_norm([gradient for gradient in counted if gradient is not None])
        square = own.double().square().to(next(iter(self.masters.values())).device)
        dist.all_reduce(square)
        return square.sqrt().float()

    def _round_masters(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                master = self.masters[name].detach()
                if name in self.slices:
                    parameter.copy_(self.whole(name, master.to(parameter.dtype)))
                elif parameter is not self.masters[name]:
                    parameter.copy_(master)

    def _non_finite(self) -> str:
        counts = {
            name: int((~torch.isfinite(master.grad)).sum())
            for name, master in self.masters.items()
            if master.grad is not None
        }
        shown = [f"{name} ({count} elements)" for name, count in counts.items() if count]
        more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
        return ", ".join(shown[:5]) + more if shown else "parts that other ranks hold"


def _added(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """float32: `total`, if there is one, plus a gradient of another type, in place."""
    if gradient.is_cuda and gradient.dtype is torch.bfloat16 and gradient.is_contiguous():
        from kernels.triton.outside.widen import widen  # needs a GPU

        return widen(gradient, total)
    return gradient.float() if total is None else total.add_(gradient)


def _slice(parameter: nn.Parameter, replicas: Replicas) -> Slice:
    padded = math.ceil(parameter.numel() / replicas.count)
    start = min(replicas.index * padded, parameter.numel())
    return Slice(start, min(start + padded, parameter.numel()), padded)


def _fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a tensor of the target's shape, or what a flat target begins with."""
    target[tuple(slice(size) for size in value.shape)].copy_(value)

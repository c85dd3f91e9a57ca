"""A sampler's processes that can be looked into, spoiled and killed; and an actor's methods without a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from rl.actors import LearnerActor, SamplerActor, collective
from rl.sync.links import open_inlet


class OpenSampler(SamplerActor):
    @collective
    def expert_layer(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        """Of slots in any order; tensors of the host."""
        x, ids, coefficients = (tensor.to(self.device) for tensor in (x, ids, coefficients))
        method = self.sampler.experts[layer]
        return method.apply(None, x, coefficients, ids, None, None).cpu()  # type: ignore[arg-type]

    @collective
    def score(self, sequences: list[list[int]], prompt_lengths: list[int]) -> list[list[float]]:
        return self.sampler.score(sequences, prompt_lengths)

    def content(self) -> dict[str, torch.Tensor]:
        """Everything held here, derived tensors too, on the host."""
        held = {**self.sampler.weights.tensors(), **self.sampler.weights.refresh()}
        return {name: tensor.cpu() for name, tensor in held.items()}

    def take_from(self, transport: str) -> None:
        """Weights come by another transport than before."""
        self.inlet.close()
        self.inlet = open_inlet(transport, self.device)

    def spoil(self, name: str) -> None:
        """From now on one byte of `name` is another as soon as it has been installed."""
        holder = self.receiver.holder
        right = holder.refresh

        def refresh() -> Any:
            holder.tensors()[name].view(torch.uint8).flatten()[-1] ^= 1
            return right()

        self.mend = lambda: setattr(holder, "refresh", right)
        holder.refresh = refresh  # type: ignore[method-assign]

    def repair(self) -> None:
        self.mend()

    def poison(self, layer: int, expert: int) -> None:
        """An own expert, by its number here, gives NaN from now on, until weights come."""
        self.sampler.experts[layer].weights.stored["w13.outer_scales"][expert] = float("nan")  # type: ignore[union-attr]
        self.sampler.weights.refresh()

    def doom(self, passes: int) -> None:
        """The process ends after so many forward passes."""

        def passed(*_: Any) -> None:
            nonlocal passes
            passes -= 1
            if passes < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        self.sampler._model.register_forward_hook(passed)


class OpenLearner(LearnerActor):
    @torch.no_grad()
    def step(self, seed: int) -> None:
        """Every weight moves."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter += 1e-2 * parameter.abs() * noise


class Here:
    """`rl.cluster.Remote` of an object in this process."""

    def __init__(self, actor: Any) -> None:
        self._actor, self.later = actor, _Later(actor)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return getattr(self._actor, method)  # type: ignore[no-any-return]


class _Later:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Any]:
        import ray

        def call(*args: Any) -> Any:
            given = [
                ray.get(arg) if isinstance(arg, ray.ObjectRef) else arg for arg in args
            ]  # as an actor gets it
            return ray.put(getattr(self._actor, method)(*given))

        return call

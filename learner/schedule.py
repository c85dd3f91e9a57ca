"""The order in which a process works on its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from learner.megatron_api import forward_backward_pipelining_without_interleaving
from learner.model import Trunk

Forward = Callable[[int], torch.Tensor]  # number of a micro-batch -> what the model gives
Finish = Callable[
    [int, torch.Tensor], torch.Tensor
]  # and what the last stage makes of that: a loss, if it trains


def run(model: Trunk, count: int, forward: Forward, finish: Finish, train: bool) -> None:
    """`count` micro-batches, one after another; with pipeline stages by Megatron's schedule, one forward and one
    backward by turns. `finish` is called on the last stage alone. Gradients accumulate in the parameters.
    """
    if model.place.layout.pipeline == 1:
        for number in range(count):
            result = finish(number, forward(number))
            if train:
                result.backward()
        return

    def last(number: int, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        return finish(number, output), torch.zeros((), dtype=torch.int), {}

    def step(numbers: Iterator[int], _: Trunk) -> tuple[torch.Tensor, Callable[..., Any]]:
        number = next(numbers)
        return forward(number), partial(last, number)

    forward_backward_pipelining_without_interleaving(
        forward_step_func=step,
        data_iterator=iter(range(count)),
        model=model,
        num_microbatches=count,
        seq_length=1,  # unused: stages tell each other how long a micro-batch is
        micro_batch_size=1,
        forward_only=not train,
    )

"""Watches the expert layers of an engine at work, and says to which tokens the rows of each call belong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from sampler.quantization import ExpertMethod


@dataclass(frozen=True, eq=False)
class Rows:
    """Of R rows: sequences, positions, both int64 [R]: the number of the request in the call, and the place in it."""

    sequences: np.ndarray
    positions: np.ndarray


class LayerTap(Protocol):
    """x [R, H], ids integer [R, k], coefficients float32 [R, k] and output [R, H] of one call of a layer's experts.

    What it returns replaces the output; None leaves it.
    """

    def __call__(
        self,
        rows: Rows,
        x: torch.Tensor,
        ids: torch.Tensor,
        coefficients: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor | None: ...


@contextmanager
def tapped(
    model: nn.Module,
    runner: Any,
    methods: Mapping[int, ExpertMethod],
    taps: Mapping[int, LayerTap],
    first_request: int,
) -> Iterator[None]:
    """Inside, the experts of the layers in `taps` are watched, in every forward pass of `model`.

    runner: vLLM's model runner. first_request: number of the first request of the call. A call made by a tap itself is
    not watched.
    """
    rows = Rows(np.empty(0, np.int64), np.empty(0, np.int64))
    inside = False

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal rows
        batch = runner.input_batch
        starts = runner.query_start_loc.np[: batch.num_reqs + 1]
        numbers = [int(name.partition("-")[0]) - first_request for name in batch.req_ids[: batch.num_reqs]]
        positions = kwargs["positions"][: starts[-1]].cpu().numpy().astype(np.int64)
        rows = Rows(np.repeat(np.array(numbers, np.int64), np.diff(starts)), positions)

    def watch(tap: LayerTap, *tensors: torch.Tensor) -> torch.Tensor | None:
        nonlocal inside
        if inside:
            return None
        inside = True
        try:
            count = len(rows.positions)
            replaced = tap(rows, *(tensor[:count] for tensor in tensors))
        finally:
            inside = False
        if replaced is None:
            return None
        output = tensors[-1].clone()
        output[:count] = replaced.to(output)
        return output

    hook = model.register_forward_pre_hook(begin, with_kwargs=True)
    for layer, tap in taps.items():
        methods[layer].tap = lambda *tensors, tap=tap: watch(tap, *tensors)
    try:
        yield
    finally:
        hook.remove()
        for layer in taps:
            methods[layer].tap = None

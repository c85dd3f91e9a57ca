"""The experts that every token of a call was sent to, as the engine chose them.

vLLM's own capture needs its second model runner, which the CPU build does not have. Here the expert layers keep the
choices of each forward pass, and the runner says to which requests and positions its rows belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from kernels.routing import NO_ROUTE
from sampler.quantization import ExpertMethod


class RouteRecorder:
    """Follows a model's forward passes.

    runner: vLLM's model runner. methods: layer number -> what computes its experts. layers: of the whole model,
    those without experts included.

    Choices are kept beside the keys and values too, by cache slot: a request whose prompt begins with blocks that
    another one has filled is never computed there, and takes the choices that made those keys and values.
    """

    def __init__(self, runner: Any, methods: Mapping[int, ExpertMethod], layers: int) -> None:
        self._runner = runner
        self._methods = methods
        self._layers = layers
        self._top_k = next(iter(methods.values())).chosen.shape[1]
        self._by_slot = np.empty(0, np.int16)
        self._next: dict[str, int] = {}  # request -> the position after the last one computed
        # (requests, first row of each and the end, positions [T], choices [T, layers, k]) in the order of computing
        self._log: list[tuple[list[str], np.ndarray, np.ndarray, np.ndarray]] = []

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Inside, every forward pass of `model` is followed; what was recorded before is forgotten."""
        self._log, self._next = [], {}
        hook = model.register_forward_hook(self._computed, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def take(self, lengths: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Request -> int16 [length, layers, k], each token's experts by descending coefficient, for all that was
        recorded; it is forgotten then.

        NO_ROUTE: the last token, which was sampled and never computed; layers without experts.
        Raises RuntimeError when the choices of any other token are not there.
        """
        routes = {
            request: np.full((length, self._layers, self._top_k), NO_ROUTE, np.int16)
            for request, length in lengths.items()
        }
        for requests, starts, positions, rows in self._log:
            for request, start, end in zip(requests, starts, starts[1:], strict=False):
                own = routes[request]
                # The engine may run ahead of a stop token.
                end = max(start, min(end, start + len(own) - positions[start]))
                own[positions[start:end]] = rows[start:end]
        self._log, self._next = [], {}
        for request, own in routes.items():
            missing = int((own[:-1, list(self._methods)] == NO_ROUTE).any(axis=(1, 2)).sum())
            if missing:
                raise RuntimeError(
                    f"request {request}: the experts of {missing} of {len(own)} tokens are not known"
                )
        return routes

    def _computed(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> None:
        batch, table = self._runner.input_batch, self._runner.input_batch.block_table[0]
        starts = self._runner.query_start_loc.np[: batch.num_reqs + 1].copy()
        positions = kwargs["positions"][: starts[-1]].cpu().numpy().copy()
        rows = self._rows(len(positions))
        requests = [_external(name) for name in batch.req_ids[: batch.num_reqs]]
        of_row = np.repeat(np.arange(batch.num_reqs), np.diff(starts))
        self._store(table)[_slots(table, of_row, positions)] = rows
        for index, request in enumerate(requests):
            first = int(positions[starts[index]])
            # Cached: by another request, or by itself before it was preempted.
            if first and first != self._next.get(request, 0):
                before = np.arange(first)
                cached = self._by_slot[_slots(table, np.full(first, index), before)]
                self._log.append(([request], np.array([0, first]), before, cached))
            self._next[request] = int(positions[starts[index + 1] - 1]) + 1
        self._log.append((requests, starts, positions, rows))

    def _rows(self, count: int) -> np.ndarray:
        """int16 [count, layers, k] of the forward pass that has just ended."""
        rows = np.full((count, self._layers, self._top_k), NO_ROUTE, np.int16)
        for layer, method in self._methods.items():
            rows[:, layer] = method.chosen[:count].cpu().numpy()
        return rows

    def _store(self, table: Any) -> np.ndarray:
        if not self._by_slot.size:
            slots = self._runner.kv_cache_config.num_blocks * table.block_size
            self._by_slot = np.full((slots, self._layers, self._top_k), NO_ROUTE, np.int16)
        return self._by_slot


def _slots(table: Any, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Cache slots of `positions` of the requests in `rows` of vLLM's block table."""
    block, offset = np.divmod(positions, table.block_size)
    return table.block_table.np[rows, block] * table.block_size + offset


def _external(request_id: str) -> str:
    """The request's number, to which the engine adds a random suffix."""
    return request_id.partition("-")[0]

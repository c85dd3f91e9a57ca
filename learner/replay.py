"""Routing replay: the experts of each token are given, and only their coefficients are the router's own.

Near a tie of two router logits sampler and learner may choose different experts, which moves a log-probability far more
than rounding does. R3 replays the sampler's choices (Ma et al. 2025, arXiv 2510.11370), R2 those that the learner made
before an update (Zheng et al. 2025, arXiv 2507.18071, section 5.3). Gradients reach the router through the coefficients
of the experts that are replayed, normalised as the router normalises those of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from kernels.routing import NO_ROUTE


class RouteReplay:
    """Says which experts one router takes.

    routes: integer [T, k], the experts of the next forward pass; NO_ROUTE: the router's own choice. None: all its own.
    own: int64 [T, k], what the router itself would have taken in the last one.
    load: int64 [E], how often each expert was taken since this was last set to None.
    """

    def __init__(self) -> None:
        self.routes: torch.Tensor | None = None
        self.own: torch.Tensor | None = None
        self.load: torch.Tensor | None = None

    @contextmanager
    def following(self, routes: torch.Tensor | None) -> Iterator[None]:
        """Inside, the router follows `routes`; afterwards, what it followed before."""
        before, self.routes = self.routes, routes
        try:
            yield
        finally:
            self.routes = before

    def choose(self, own: torch.Tensor, experts: int) -> torch.Tensor:
        """Of the router's own choice out of so many experts, int64 [T, k], what is taken, [T, k]."""
        self.own = own
        taken = own if self.routes is None else torch.where(self.routes == NO_ROUTE, own, self.routes)
        load = _count(taken, experts)
        self.load = load if self.load is None else self.load + load
        return taken


def _count(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """int64 [E]: how often each expert is named. The histogram would make the host wait for a GPU."""
    if not ids.is_cuda:
        return torch.bincount(ids.flatten(), minlength=experts)
    ordered = ids.flatten().to(torch.int16).sort().values
    bounds = torch.arange(experts + 1, dtype=torch.int16, device=ids.device)
    return torch.searchsorted(ordered, bounds).diff()


@contextmanager
def replayed(replays: Sequence[RouteReplay], routes: torch.Tensor | None) -> Iterator[None]:
    """Inside, the routers of layers 0, 1, ... follow `routes`, integer [T, layers, k]."""
    chosen = [None] * len(replays) if routes is None else routes.long().unbind(1)
    with ExitStack() as stack:
        for replay, own in zip(replays, chosen, strict=True):
            stack.enter_context(replay.following(own))
        yield


def own_routes(replays: Sequence[RouteReplay]) -> torch.Tensor:
    """int16 [T, layers, k]: what the routers themselves chose in the last forward pass."""
    return torch.stack([replay.own for replay in replays if replay.own is not None], 1).to(torch.int16)


def take_load(replays: Sequence[RouteReplay]) -> torch.Tensor | None:
    """int64 [layers, E] on the CPU: how often each expert was taken since this was last called; None: nothing ran."""
    loads = [replay.load for replay in replays if replay.load is not None]
    for replay in replays:
        replay.load = None
    return torch.stack(loads).cpu() if loads else None


def check_routes(routes: torch.Tensor, experts: int, shape: Sequence[int]) -> None:
    """Raise ValueError unless `routes` is int16 of `shape` [B, S, layers, k] and names, of each token in each layer, k
    different experts of [0, experts), or k times NO_ROUTE."""
    if routes.dtype != torch.int16 or routes.shape != torch.Size(shape):
        raise ValueError(f"routes must be int16 {list(shape)}, got {routes.dtype} {list(routes.shape)}")
    outside = (routes < NO_ROUTE) | (routes >= experts)
    if bool(outside.any()):
        found = f"{int(routes.min())} to {int(routes.max())}"
        raise ValueError(f"routes must lie in [0, {experts}), or be {NO_ROUTE}, got {found}")
    ordered = routes.sort(dim=-1).values
    repeated = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NO_ROUTE)).any(-1)
    none = routes == NO_ROUTE
    wrong = repeated | (none.any(-1) & ~none.all(-1))
    if bool(wrong.any()):
        row, position, layer = (int(index) for index in wrong.nonzero()[0])
        raise ValueError(
            f"routes of token {position} of sequence {row} in layer {layer}:"
            f" {routes[row, position, layer].tolist()} names an expert twice, or not all of them"
        )

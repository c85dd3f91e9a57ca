"""What the expert layers of a policy are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.routing import NO_ROUTE
from learner.packing import Packing
from learner.policy import Policy


def experts_taken(policy: Policy, call: Callable[[], Any], lengths: torch.Tensor) -> torch.Tensor:
    """int64 [B, S, layers, k], ascending: the experts of every token while `call` computes sequences of `lengths` in
    one micro-batch; NO_ROUTE in padding.
    """
    seen: list[torch.Tensor] = []
    hooks = [
        experts.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1].clone()))
        for experts in policy.model.experts()
    ]
    call()
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(hooks)
    order = lengths.sort(descending=True, stable=True).indices  # of a micro-batch
    taken = Packing.of(lengths[order]).unpack(torch.stack(seen, 1), NO_ROUTE)
    return taken[order.argsort()].sort(-1).values

"""How the tokens of a step were shared out over the experts of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAYERS = 128  # as many as the table of metrics has rows for


def expert_load_by_layer(counts: torch.Tensor) -> dict[str, float]:
    """counts: int64 [layers, E], tokens that each expert got; every layer has some (see `rl.usage.expert_load`).

    Of each of the first `LAYERS` layers `experts/active/LLL`, the number of experts with any token, and
    `experts/load/LLL`, the largest load over the mean one (1: all alike).
    """
    active = (counts > 0).sum(1)
    largest = counts.amax(1).double() / counts.double().mean(1)
    metrics: dict[str, float] = {}
    for layer in range(min(len(counts), LAYERS)):
        metrics[f"experts/active/{layer:03d}"] = int(active[layer])
        metrics[f"experts/load/{layer:03d}"] = largest[layer].item()
    return metrics

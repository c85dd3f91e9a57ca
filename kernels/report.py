"""What an engine says about how it runs the expert layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernels.precision_map import PrecisionMap


@dataclass(frozen=True)
class EngineReport:
    """The specs an engine resolved, and how often the code that implements them ran."""

    engine: str
    precision_map: PrecisionMap
    backend: str  # which implementations of the specs, e.g. "reference"
    expert_layers: int  # layers whose experts this package computes
    expert_calls: int  # forward calls of those layers since the engine started


def names(backends: Iterable[str]) -> str:
    """The back ends of all layers, each named once, in the order of the first layer that has it."""
    return ", ".join(dict.fromkeys(backends))

"""Tiles of the products: measured defaults, and on request a measurement, kept for each device and shape.

Every tile gives the same bits (the order of sums along K is the tensor core's own), so that this choice is one of speed
alone. Nothing is measured on import, nor inside a call: `measure` is for whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupedTile:
    """rows x columns of the output, `depth` along K at a time; parts: in how many pieces the output is stored."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    parts: int
    programs_per_processor: int = 1


@dataclass(frozen=True)
class DecodeTile:
    """Rows of an expert that are multiplied at a time."""

    rows: int
    stages: int = 3
    warps: int = 4


# Measured on an H200; kernels/README.md has the numbers.
EMULATED = (
    GroupedTile(128, 256, 64, 4, 8, 2),
    GroupedTile(128, 256, 64, 3, 8, 1),
    GroupedTile(128, 128, 64, 3, 4, 2, 2),
)
NATIVE = (GroupedTile(128, 128, 256, 3, 4, 1), GroupedTile(128, 256, 256, 3, 4, 1))
INTERPRETED = GroupedTile(128, 128, 128, 1, 4, 1)

Key = tuple[str, bool, int, int]
_measured: dict[Key, GroupedTile] = {}


def grouped_tile(device: torch.device, columns: int, depth: int, *, native: bool) -> GroupedTile:
    """For weights [E, columns, depth]: what `measure` found, else the default."""
    if device.type != "cuda":
        return INTERPRETED
    return _measured.get(_key(device, columns, depth, native), (NATIVE if native else EMULATED)[0])


def few_rows(slots: int, num_experts: int) -> bool:
    """Whether so many token slots are few enough for the product that reads packed weights to be the faster one."""
    return slots <= 32 * num_experts


def decode_tile(slots: int, num_experts: int) -> DecodeTile:
    """For so many token slots: as many rows as most experts have under a balanced load, at least 16."""
    average = slots / num_experts
    return DecodeTile(16 if average <= 6 else 32 if average <= 20 else 64)


def measure(
    device: torch.device,
    columns: int,
    depth: int,
    run: Callable[[GroupedTile], object],
    *,
    native: bool = False,
) -> GroupedTile:
    """Time `run` with every candidate, keep the fastest for this device and shape, and return it."""
    candidates: Sequence[GroupedTile] = NATIVE if native else EMULATED
    times = {tile: _median_time(run, tile) for tile in candidates}
    best = min(candidates, key=lambda tile: times[tile])
    _measured[_key(device, columns, depth, native)] = best
    return best


def _key(device: torch.device, columns: int, depth: int, native: bool) -> Key:
    return (torch.cuda.get_device_name(device), native, columns, depth)


def _median_time(run: Callable[[GroupedTile], object], tile: GroupedTile, repeats: int = 9) -> float:
    """Milliseconds."""
    run(tile)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(tile)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]

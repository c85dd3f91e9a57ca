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
class PackedTile:
    """For products that read 4 bits: so many rows of an expert at a time, and 128 features. registers: the most that a
    thread may take.
    """

    rows: int
    stages: int = 3
    warps: int = 4
    registers: int | None = None
    programs_per_processor: int = 1  # of those that stay


# Measured on an H200; kernels/README.md has the numbers.
# Two small programs a processor hide each other's epilogue, which is long beside a short K; over a long K with many
# rows, wide tiles read less.
_NARROW, _WIDE = GroupedTile(128, 128, 64, 3, 4, 2, 2), GroupedTile(128, 256, 64, 3, 8, 1)
_SHORT, _MANY = 1024, 200_000  # elements along K; rows
EMULATED = (_NARROW, _WIDE, GroupedTile(128, 256, 64, 4, 8, 2))
NATIVE = (GroupedTile(128, 128, 256, 3, 4, 1), GroupedTile(128, 128, 256, 2, 4, 1))
INTERPRETED = GroupedTile(128, 128, 128, 1, 4, 1)

# By rows of a tile, of which 16 are the fewest that the tensor core takes. More rows share the decoding of a weight,
# and more of them are padding. Where registers are bounded, one more program fits a processor. `decode_gemm` takes the
# tiles of FEW_ROWS, `packed_gemm` those of PACKED.
FEW_ROWS = {16: PackedTile(16, registers=96), 32: PackedTile(32)}
PACKED = {
    64: PackedTile(64, registers=128, programs_per_processor=4),
    128: PackedTile(128, stages=4, programs_per_processor=2),
}
# Up to how many rows an expert has on average a tile is the fastest; above all of them, the last.
_FASTEST = ((14, 16), (32, 32), (80, 64))
# Up to how many products that read 4 bits are faster than those of decoded weights, and than to decode them first (the
# latter interpolated: faster to read 4 bits at 512, slower at 4,096).
_READS_PACKED, _READS_PACKED_IF_COMPACT = 256, 1536

Key = tuple[str, bool, int, int, int]
_measured: dict[Key, GroupedTile] = {}


def grouped_tile(device: torch.device, rows: int, columns: int, depth: int, *, native: bool) -> GroupedTile:
    """For so many grouped rows and weights [E, columns, depth]: what `measure` found, else the default."""
    if device.type != "cuda":
        return INTERPRETED
    default = NATIVE[0] if native else _NARROW if depth <= _SHORT or rows < _MANY else _WIDE
    return _measured.get(_key(device, rows, columns, depth, native), default) if _measured else default


def reads_packed(rows: int, num_experts: int, *, compact: bool = False) -> bool:
    """Whether products of so many rows read weights in 4 bits, rather than decoded ones. compact: where those would
    have to be decoded first.
    """
    return rows <= (_READS_PACKED_IF_COMPACT if compact else _READS_PACKED) * num_experts


def tile_rows(slots: int, num_experts: int) -> int:
    """How many rows of an expert products that read 4 bits take at a time: a key of FEW_ROWS or of PACKED."""
    average = slots / num_experts
    return next((rows for most, rows in _FASTEST if average <= most), max(PACKED))


def measure(
    device: torch.device,
    rows: int,
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
    _measured[_key(device, rows, columns, depth, native)] = best
    return best


def _key(device: torch.device, rows: int, columns: int, depth: int, native: bool) -> Key:
    """Numbers of rows within a factor of two share a tile."""
    return (torch.cuda.get_device_name(device), native, rows.bit_length(), columns, depth)


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

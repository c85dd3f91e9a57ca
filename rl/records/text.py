"""Numbers for people."""

from __future__ import annotations


def quantity(value: float | int, unit: str = "") -> str:
    """`value` to four significant digits with a unit of `rl.metrics`; shares become percent."""
    match unit:
        case "share":
            return f"{plain(100 * value)} %"
        case "bytes":
            return size(value)
        case "":
            return plain(value)
        case _:
            return f"{plain(value)} {unit}"


def plain(value: float | int) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:.3e}" if abs(value) < 1e4 else f"{value:,.0f}"


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{plain(round(count, 1))} {unit}"
        count /= 1024
    return f"{plain(round(count, 1))} TiB"


def duration(seconds: float) -> str:
    """42s, 3m05s, 2h07m, 3d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"

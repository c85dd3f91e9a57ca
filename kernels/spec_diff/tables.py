"""Tables and numbers for the command lines."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of as many cells -> lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def percent(share: float | None) -> str:
    """Three digits; "-" for None, "0" for exactly zero."""
    if share is None:
        return "-"
    return f"{100 * share:.3g}%" if share else "0"

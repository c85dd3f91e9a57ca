"""metrics.jsonl, the record of a run that everything else is drawn from: one JSON object a line.

    {"step": 12, "reward/mean": 0.41, "gap/p99": 0.0123, ...}

Steps never decrease; a step may have several lines, which add up. A line that a kill cut short can only be
the last one; it is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rl.metrics import METRICS
from rl.run_folder import write_atomically

Number = float | int
History = dict[int, dict[str, Number]]  # step -> metric -> value, steps ascending


def encode_line(step: int, metrics: Mapping[str, Number]) -> str:
    """One line, with its newline."""
    return json.dumps({"step": step, **metrics}, allow_nan=False) + "\n"


def decode_line(line: str) -> tuple[int, dict[str, Number]]:
    """The inverse of `encode_line`. Raises ValueError for anything else."""
    values = json.loads(line)
    if not line.endswith("\n") or not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise ValueError(f"not a line of metrics: {line[:80]!r}")
    return values.pop("step"), values


def read_history(path: Path) -> History:
    """The metrics of every step; empty when the file is missing.

    Raises ValueError naming the line when one before the last is not a line of metrics.
    """
    history: History = {}
    for _, step, metrics in _lines(path):
        history.setdefault(step, {}).update(metrics)
    return dict(sorted(history.items()))


def comparable(history: History) -> History:
    """`history` without volatile metrics: equal for an interrupted and an uninterrupted run."""
    return {
        step: {
            name: value
            for name, value in metrics.items()
            if name not in METRICS or not METRICS[name].volatile
        }
        for step, metrics in history.items()
    }


def cut_back(path: Path, step: int) -> None:
    """Remove, atomically, every line of a step after `step`, and a last line that was cut short."""
    kept = "".join(line for line, at, _ in _lines(path) if at <= step)
    if path.exists() and kept != path.read_text(encoding="utf-8", errors="replace"):
        write_atomically(path, kept)


def _lines(path: Path) -> Iterator[tuple[str, int, dict[str, Number]]]:
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            yield (line, *decode_line(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: {error}") from error

"""The report of a run: one HTML file that needs nothing else, made from what the run folder holds.

python -m rl.records.report RUN_FOLDER
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from rl.errors import UserError
from rl.metrics import METRICS
from rl.records.charts import PANELS, SMOOTHING, draw_panel, points
from rl.records.history import History, Number, read_history
from rl.records.page import render
from rl.records.provenance import read_run_json
from rl.records.text import duration, quantity
from rl.run_folder import RunFolder, RunFolderError, write_atomically


def write_report(folder: RunFolder) -> Path:
    """Make report.html from config.yaml, metrics.jsonl and run.json; at any time, as often as wanted.

    Metrics that the run lacks are left out, and names that the table does not know are not shown. Raises
    RunFolderError when one of the files is damaged.
    """
    try:
        config = folder.config.read_text(encoding="utf-8")
        wanted = _iterations_wanted(config)
        history = read_history(folder.metrics)
        described = read_run_json(folder)
    except (ValueError, yaml.YAMLError) as error:
        raise RunFolderError(f"{folder.path}: cannot be reported: {error}") from error
    known = {
        step: {name: value for name, value in metrics.items() if name in METRICS}
        for step, metrics in history.items()
    }
    page = render(
        {
            "title": folder.title,
            "state": _state(known, wanted, described),
            **_result(known),
            "tiles": _tiles(known, described),
            "charts": [chart for panel in PANELS if (chart := draw_panel(panel, known))],
            "smoothing": SMOOTHING,
            **_specs(described),
            "config": config.strip(),
            "launches": [describe_launch(launch) for launch in described.get("launches", [])],
            "metrics": _metric_rows(known),
        }
    )
    write_atomically(folder.report, page)
    return folder.report


def _iterations_wanted(config: str) -> int | None:
    values = yaml.safe_load(config)
    run = values.get("run") if isinstance(values, dict) else None
    wanted = run.get("iterations") if isinstance(run, dict) else None
    return wanted if isinstance(wanted, int) else None


def _state(history: History, wanted: int | None, described: dict[str, Any]) -> str:
    done = max(history, default=0)
    total = f" of {wanted}" if wanted is not None else ""
    started = [launch["started"] for launch in described.get("launches", [])]
    when = f", started {started[0]}" if started else ""
    resumed = f", resumed {len(started) - 1} times" if len(started) > 2 else ", resumed once"
    return f"{done}{total} iterations{when}" + (resumed if len(started) > 1 else "")


def _result(history: History) -> dict[str, str]:
    """The line that answers: did it learn?"""
    lines = []
    for name, label in (
        ("held_out/reward", "Held-out reward"),
        ("held_out/accuracy", "Held-out accuracy"),
        ("reward/mean", "Training reward"),
    ):
        steps, values = points(history, name)
        unit = METRICS[name].unit
        if len(values) > 1:
            first, last = quantity(values[0], unit), quantity(values[-1], unit)
            lines.append(f"{label} {first} → {last} (iteration {steps[0]:.0f} → {steps[-1]:.0f})")
        elif len(values):
            lines.append(f"{label} {quantity(values[0], unit)} at iteration {steps[0]:.0f}")
    return {"result": lines[0] if lines else "No rewards yet", "result_note": "; ".join(lines[1:])}


def _tiles(history: History, described: dict[str, Any]) -> list[tuple[str, str]]:
    tiles = []
    for name, label in (
        ("gap/p99", "gap P99, last"),
        ("gap/beyond_clip", "beyond the clip range, last"),
        ("rate/tokens_per_second", "throughput, last"),
    ):
        values = points(history, name)[1]
        if len(values):
            tiles.append((label, quantity(values[-1], METRICS[name].unit)))
    generated = points(history, "tokens/generated")[1]
    if len(generated):
        tiles.append(("tokens generated", quantity(generated.sum())))
    seconds = points(history, "time/iteration")[1]
    if len(seconds):
        tiles.append(("time in iterations", duration(seconds.sum())))
    names = dict.fromkeys(spec["name"] for spec in described.get("specs", []))
    if names:
        tiles.append(("specification", ", ".join(names)))
    return tiles


def _specs(described: dict[str, Any]) -> dict[str, Any]:
    engines = described.get("engines", [])
    same = len({engine["fingerprint"] for engine in engines}) == 1
    names = ", ".join(engine["engine"] for engine in engines)
    verdict = f"One fingerprint in {names}: each layer's experts are computed under the same specification."
    if not same:
        verdict = f"The fingerprints of {names} differ: the engines do not compute the same function."
    return {
        "engines": engines,
        "same_spec": same,
        "spec_verdict": verdict,
        "specs": described.get("specs", []),
    }


def describe_launch(launch: dict[str, Any]) -> dict[str, Any]:
    """Heading, command and rows of a launch in run.json."""
    at = launch["resumed_at"]
    machine, git = launch["machine"], launch["git"]
    source = "not under version control"
    if git:
        source = git["commit"] + (" with uncommitted changes" if git["modified"] else "")
    return {
        "heading": f"Started {launch['started']}" + ("" if at is None else f", resumed at iteration {at}"),
        "command": launch["command"],
        "rows": [
            ("source", source),
            ("machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"),
            ("accelerators", ", ".join(machine["gpus"]) or "none"),
            ("system", machine["system"]),
            ("packages", ", ".join(f"{name} {found}" for name, found in launch["versions"].items())),
        ],
    }


def _metric_rows(history: History) -> list[dict[str, Any]]:
    rows = []
    for name, row in METRICS.items():
        values: list[Number] = [metrics[name] for metrics in history.values() if name in metrics]
        if values:
            shown = (values[0], values[-1], min(values), max(values))
            rows.append(
                {
                    "name": name,
                    "meaning": row.meaning,
                    "reducer": row.reducer,
                    "unit": row.unit,
                    "quantities": [
                        quantity(value, row.unit if row.unit in ("share", "bytes") else "") for value in shown
                    ],
                }
            )
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rl.records.report", description="Make report.html from what a run folder holds."
    )
    parser.add_argument("run_folder", type=Path)
    try:
        print(write_report(RunFolder.open(parser.parse_args(arguments).run_folder)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

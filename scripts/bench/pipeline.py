"""Serial and one step off, one after the other: what is learned, and how long an iteration takes.

    python scripts/bench/pipeline.py +recipe=tiny run.output_dir=FOLDER [group.key=value ...]

Prints, for each, the mean held-out reward over the last five evaluations, the median seconds of an iteration and of its
stages, the seconds of sampling behind updates, and the mean age of the tokens in weight versions.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rl.compose import load_config
from rl.records.history import History, read_history

KINDS = ("serial", "one_step_off")
STAGES = ("generate", "reward", "score", "update", "sync", "overlapped")
LAST_EVALUATIONS = 5


def main(overrides: list[str]) -> None:
    rows = []
    for kind in KINDS:
        name = f"pipeline_{kind}"
        own = [*overrides, f"run.name={name}", f"algorithm.pipeline={kind}"]
        started, load = time.perf_counter(), os.getloadavg()[0]
        subprocess.run([sys.executable, "-m", "rl.train", *own], check=True)
        seconds = time.perf_counter() - started
        folder = Path(load_config(own).run.output_dir) / name / "latest"
        rows.append(row(kind, read_history(folder / "metrics.jsonl")))
        print(
            f"{kind}: {seconds:.0f} s in all, load average {load:.1f} at its start, {os.getloadavg()[0]:.1f} at its end"
        )
    titles = ("pipeline", "held-out reward", "s an iteration", *STAGES, "age of tokens", "gap p99")
    for line in (titles, *rows):
        print(" ".join(f"{cell:>15s}" for cell in line))


def row(kind: str, history: History) -> tuple[str, ...]:
    """The cells of one run; iteration 1, in which one step off cannot overlap yet, is left out of the medians."""
    steps = [metrics for step, metrics in history.items() if step > 1]
    rewards = [metrics["held_out/reward"] for metrics in steps if "held_out/reward" in metrics]

    def median(name: str) -> float:
        return statistics.median(metrics.get(name, 0.0) for metrics in steps)

    return (
        kind,
        f"{statistics.mean(rewards[-LAST_EVALUATIONS:]):.3f}",
        f"{median('time/iteration'):.3f}",
        *(f"{median(f'time/{stage}'):.3f}" for stage in STAGES),
        f"{median('staleness/mean'):.2f}",
        f"{median('gap/p99'):.4f}",
    )


if __name__ == "__main__":
    main(sys.argv[1:])

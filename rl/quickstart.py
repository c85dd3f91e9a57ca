"""The recipe `tiny` as it stands, and a word where it learned less than the README says.

python -m rl.quickstart [group.key=value ...]
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from rl import train
from rl.records.history import read_history
from rl.run_folder import RunFolder

JOB = ("+recipe=tiny", "run.name=quickstart")
LATEST = Path("outputs/quickstart/latest")
METRIC, EXPECTED = "held_out/reward", 0.85


def main(arguments: list[str]) -> int:
    """The exit status of `rl.train`, with overrides after those of the job."""
    status = train.main([*JOB, *arguments])
    if status == 0 and not arguments:  # an override can change what is to be expected, and where the run is
        shortfall = below_expectation(RunFolder.open(LATEST))
        if shortfall:
            print(f"{LATEST}: {shortfall}", file=sys.stderr)
    return status


def below_expectation(folder: RunFolder) -> str | None:
    """One line where the last held-out reward is less than expected, else None."""
    values = {
        step: metrics[METRIC] for step, metrics in read_history(folder.metrics).items() if METRIC in metrics
    }
    step = max(values, default=0)
    if values and values[step] >= EXPECTED:
        return None
    found = f"{values[step]:.2f} after iteration {step}" if values else "not recorded"
    return (
        f"{METRIC} is {found}, expected is {EXPECTED} or more; report.html shows its course, and"
        f" python -m rl.train run.resume={folder.path} run.iterations={2 * step or 120} goes on"
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main(sys.argv[1:]))

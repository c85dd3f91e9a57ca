r"""Does it matter for learning that the engines agree, and does it matter to correct for it where they do not?

    python scripts/bench/ablation.py outputs/ablation
    options: --recipe NAME (tiny), --seeds N (3), --iterations N (100), --engines NAMES (practical,strict)
             --prefix COMMAND: put before every run, e.g. "nice -n 10"; --read: of the runs that there are, start none
             any key=value: of the configuration, for all runs

Each of the engines' ways (practical: spec=minite; strict: spec=strict; stock: the sampler computes its experts in
BF16 in vLLM's own way, so that the gap is large) runs with and without truncated importance sampling (TIS), once a
seed, one run after another. A run that was cut short is gone on with; one that has finished is not repeated.

Prints a table, and writes it to FOLDER/ablation.md and the curves to FOLDER/ablation.png.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl.records.charts import COLOURS, STYLES
from rl.records.history import History, comparable, read_history

ENGINES = {
    "practical": ("spec=minite",),
    "strict": ("spec=strict",),
    "stock": (
        "spec=minite",
        "sampler.stock=true",
        "spec.allow_difference=true",
        "sync.codec=bf16",
        "learner.dtype=bfloat16",
        "sampler.dtype=bfloat16",
    ),
}
CORRECTIONS = {
    "TIS": "algorithm.objective.correction.weight=token",
    "none": "algorithm.objective.correction.weight=off",
}
Way = tuple[str, str]  # names of engines and correction
Histories = dict[Way, dict[int, History]]  # of every seed
NO_GAP = 1e-9  # nats; the place of a gap of zero on a logarithmic axis


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Runs with and without a gap, with and without a correction."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--engines", default="practical,strict")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--read", action="store_true")
    options, overrides = parser.parse_known_args()
    engines = options.engines.split(",")
    if unknown := set(engines) - set(ENGINES):
        parser.error(f"--engines {','.join(sorted(unknown))}: of {', '.join(ENGINES)}")
    ways = list(itertools.product(engines, CORRECTIONS))
    if not options.read:
        for seed, way in itertools.product(range(options.seeds), ways):
            run(way, seed, options, overrides)
    found = read(ways, options)
    if not found:
        parser.error(f"no finished run in {options.folder}")
    table = "\n".join([*rows(found), "", *notes(found)])
    print(table)
    (options.folder / "ablation.md").write_text(table + "\n")
    draw(found, options.folder / "ablation.png")


def run(way: Way, seed: int, options: argparse.Namespace, overrides: list[str]) -> None:
    """Start, or go on with, one run; a finished one is left alone."""
    done = marker(way, seed, options)
    if done.exists():
        return
    settings = [
        f"+recipe={options.recipe}",
        f"run.name={done.parent.name}",
        f"run.output_dir={options.folder}",
        f"run.cache_dir={options.folder / 'cache'}",
        f"run.seed={seed}",
        f"run.iterations={options.iterations}",
        "run.resume=latest",
        "logging.wandb=off",
        *ENGINES[way[0]],
        CORRECTIONS[way[1]],
    ]
    command = [*shlex.split(options.prefix), sys.executable, "-m", "rl.train", *settings, *overrides]
    print(shlex.join(command), flush=True)
    subprocess.run(command, check=True)
    done.touch()


def marker(way: Way, seed: int, options: argparse.Namespace) -> Path:
    """The file that says that a run has finished."""
    return options.folder / f"{'-'.join(way)}-{seed}" / f"finished-{options.iterations}"


def read(ways: list[Way], options: argparse.Namespace) -> Histories:
    """The metrics of all finished runs."""
    found: Histories = {}
    for way, seed in itertools.product(ways, range(options.seeds)):
        done = marker(way, seed, options)
        if done.exists():
            found.setdefault(way, {})[seed] = read_history(done.parent / "latest" / "metrics.jsonl")
    return found


def values(history: History, name: str) -> list[float]:
    return [float(metrics[name]) for metrics in history.values() if name in metrics]


def rows(found: Histories) -> list[str]:
    """A row for each way: over its seeds, mean and standard deviation of what it learned, and its gap."""
    lines = [
        "| engines | correction | runs | held-out reward, last | reward, mean of all iterations"
        " | gap P99, median | gap, largest | beyond the clip range | ESS, least | weights cut |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (engines, correction), runs in found.items():
        histories = list(runs.values())

        def over_seeds(name: str, last: bool, histories: list[History] = histories) -> str:
            each = [values(h, name)[-1] if last else statistics.mean(values(h, name)) for h in histories]
            spread = f" ± {statistics.stdev(each):.3f}" if len(each) > 1 else ""
            return f"{statistics.mean(each):.3f}{spread}"

        def of_all(name: str, histories: list[History] = histories) -> list[float]:
            return [value for history in histories for value in values(history, name)]

        cells = [
            engines,
            correction,
            str(len(histories)),
            over_seeds("held_out/reward", last=True),
            over_seeds("reward/mean", last=False),
            f"{statistics.median(of_all('gap/p99')):.1e}",
            f"{max(of_all('gap/max')):.1e}",
            f"{statistics.mean(of_all('gap/beyond_clip')):.2%}",
            f"{min(of_all('gap/ess')):.6f}",
            f"{statistics.mean(of_all('correction/clipped')):.2%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def notes(found: Histories) -> list[str]:
    """Differences within a seed, and in which iterations the runs with and without a correction are the same run."""
    lines = []
    for first, second in itertools.combinations(found, 2):
        if first[0] != second[0] and first[1] != second[1]:
            continue
        seeds = sorted(found[first].keys() & found[second].keys())
        pairs = [(found[first][seed], found[second][seed]) for seed in seeds]
        changes = [
            statistics.mean(values(b, "reward/mean")) - statistics.mean(values(a, "reward/mean"))
            for a, b in pairs
        ]
        same = sum(learned(a) == learned(b) for a, b in pairs)
        listed = ", ".join(f"{change:+.4f}" for change in changes)
        lines.append(
            f"- {' '.join(second)} against {' '.join(first)}: mean reward {listed} (by seed);"
            f" {same} of {len(pairs)} runs equal in every metric of every iteration"
        )
    return lines


def learned(history: History) -> History:
    """All that does not depend on the machine's mood, but for the description of the weights themselves."""
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith("correction/")}
        for step, metrics in comparable(history).items()
    }


def draw(found: Histories, path: Path) -> None:
    """Held-out reward and the largest gap of every iteration: means over seeds, and bands from least to most."""
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        reward, gap = figure.subplots(1, 2)
        for number, (way, runs) in enumerate(found.items()):
            look = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number % len(STYLES)]}
            _band(reward, list(runs.values()), "held_out/reward", 0.0, look, f"{way[0]}, {_name(way[1])}")
            _band(gap, list(runs.values()), "gap/max", NO_GAP, look)
        reward.set(title="Held-out reward", xlabel="iteration")
        gap.set(
            title=f"Largest gap of an iteration, nats ({NO_GAP:.0e}: zero)", xlabel="iteration", yscale="log"
        )
        figure.legend(loc="outside lower center", ncols=4)
        figure.savefig(path, dpi=130)


def _name(correction: str) -> str:
    return {"TIS": "TIS", "none": "no correction"}[correction]


def _band(
    axes: Axes,
    histories: list[History],
    name: str,
    least: float,
    look: dict[str, object],
    label: str | None = None,
) -> None:
    steps = sorted(set.intersection(*({s for s, m in h.items() if name in m} for h in histories)))
    curves = np.array([[max(float(h[s][name]), least) for s in steps] for h in histories])
    axes.plot(steps, curves.mean(0), linewidth=1.2, label=label, **look)  # type: ignore[arg-type]
    axes.fill_between(steps, curves.min(0), curves.max(0), color=str(look["color"]), alpha=0.15, linewidth=0)


if __name__ == "__main__":
    main()

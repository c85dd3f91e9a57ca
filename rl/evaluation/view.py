"""What the terminal shows of an evaluation: progress, and a table of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rl.evaluation.estimators import Estimate
from rl.evaluation.results import Difference, Result
from rl.evaluation.summary import Summary

_PIPE_WIDTH = 150  # characters of a line where there is no terminal to ask


def open_console() -> Console:
    """The terminal, or what stands in its place."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_PIPE_WIDTH)


@contextmanager
def progress(
    console: Console, title: str, total: int, what: str = "samples"
) -> Iterator[Callable[[int], None]]:
    """Shows how many of `total` (samples, say) there are: a bar on a terminal, elsewhere a line at begin and end."""
    if not console.is_terminal:
        counts = [0]
        console.print(f"{title}: {total} {what}")
        yield lambda done: counts.append(done)
        console.print(f"{title}: {counts[-1]} of {total} done")
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def results_table(title: str, results: Sequence[Result], differences: Sequence[Difference]) -> Table:
    """One row a benchmark and spec; shares in percent, intervals in brackets."""
    against = {(difference.exam.name, difference.second): difference for difference in differences}
    table = Table(title=title, title_justify="left")
    for heading in ("benchmark", "spec", "metric"):
        table.add_column(heading)
    for heading in ("score %", "also %", "cut %", "tokens", "errors", "first spec minus this"):
        table.add_column(heading, justify="right")
    before = ""
    for result in results:
        name, summary = result.exam.name, result.summary
        if before and name != before:
            table.add_section()
        difference = against.get((name, result.spec))
        table.add_row(
            name if name != before else "",
            result.spec,
            metric_name(result),
            interval(result.score),
            _also(result.exam.benchmark.metric, summary),
            f"{100 * summary.truncated:.0f}",
            f"{summary.length_mean:.0f}",
            str(summary.errors),
            interval(difference.score, signed=True) if difference else "",
        )
        before = name
    return table


def metric_name(result: Result) -> str:
    """avg@6, or the name of IFEval's metric in words."""
    metric = result.exam.benchmark.metric
    return f"avg@{result.summary.samples}" if metric == "avg" else metric.replace("_", " ")


def interval(estimate: Estimate | None, signed: bool = False) -> str:
    """``12.3 [4.5, 20.1]``: percent; a dash where there is no result."""
    if estimate is None:
        return "-"
    sign = "+" if signed else ""
    value, low, high = (100 * part for part in (estimate.value, estimate.low, estimate.high))
    return f"{value:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def _also(metric: str, summary: Summary) -> str:
    """The other metrics: the largest pass@k, or the three others of IFEval."""
    others = {name: estimate for name, estimate in summary.metrics.items() if name != metric}
    passes = [name for name in others if name.startswith("pass@")]
    if passes:
        largest = max(passes, key=lambda name: int(name.removeprefix("pass@")))
        others = {largest: others[largest]}
    shown = (f"{name.replace('_', ' ')} {100 * estimate.value:.1f}" for name, estimate in others.items())
    return ", ".join(shown)

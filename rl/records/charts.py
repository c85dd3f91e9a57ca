"""The charts of a report, drawn by matplotlib (no display needed) as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import (
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
    StrMethodFormatter,
)

from rl.metrics import METRICS
from rl.records.history import History
from rl.records.text import quantity

# Okabe and Ito's colours, distinguishable with any colour vision; line styles distinguish them in print.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444", "#b8a800")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "svg.hashsalt": "minite",
}
_INCHES = (6.2, 3.3)
# Free at the sides, as shares of the width; half the last step's number is on the right.
_LEFT, _RIGHT = 0.01, 0.025
_COLUMNS = 3  # of the legend
_SMOOTHED = 40  # points from which on a curve has a moving average
SMOOTHING = (
    f"Where a curve has {_SMOOTHED} points or more, the pale line is what was measured and the bold one its"
    " moving average, over 9 points or a fiftieth of the run, whichever is more."
)


@dataclass(frozen=True)
class Panel:
    """One chart: which metrics, drawn how."""

    title: str
    names: tuple[str, ...]
    draw: Callable[[Axes, History, Sequence[str]], None]


@dataclass(frozen=True)
class Chart:
    """A drawn panel. `series` holds (metric, meaning) pairs; `alternative` says what is to be seen."""

    title: str
    svg: bytes
    series: list[tuple[str, str]]
    alternative: str


def draw_panel(panel: Panel, history: History) -> Chart | None:
    """The chart, of those metrics of the panel that the run has; None when it has none of them."""
    names = [name for name in panel.names if any(name in metrics for metrics in history.values())]
    if not names:
        return None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_INCHES)
        axes = figure.add_subplot()
        panel.draw(axes, history, panel.names)  # all of them: a metric has the same colour in every report
        axes.set_xlabel("iteration")
        axes.set_axisbelow(True)
        _limit_steps(axes, list(history))
        _arrange(figure, axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    series = [(name, METRICS[name].meaning) for name in names]
    return Chart(panel.title, buffer.getvalue(), series, _in_words(panel.title, history, names))


def points(history: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps that have a metric, and its values there."""
    found = [(step, metrics[name]) for step, metrics in history.items() if name in metrics]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, dtype=float), np.array(values, dtype=float)


def lines(axes: Axes, history: History, names: Sequence[str]) -> None:
    """One curve a metric; a moving average over the faint curve where there are many points."""
    for index, name in enumerate(names):
        steps, values = points(history, name)
        look: dict[str, Any] = {"color": COLOURS[index], "linestyle": STYLES[index], "label": name}
        if len(steps) >= _SMOOTHED:
            alpha, width = (0.35, 0.8) if len(steps) < 300 else (0.2, 0.5)
            axes.plot(steps, values, color=COLOURS[index], linewidth=width, alpha=alpha)
            axes.plot(steps, _moving_average(values), **look)
        elif len(steps):
            axes.plot(steps, values, marker="o" if len(steps) < 25 else None, markersize=3.5, **look)
    _value_axis(axes, names)


def log_lines(axes: Axes, history: History, names: Sequence[str]) -> None:
    """Curves on a logarithmic axis that ends in zero: below its smallest decade the axis is linear."""
    lines(axes, history, names)
    values = np.concatenate([points(history, name)[1] for name in names])
    positive = values[values > 0]
    if not len(positive):
        axes.set_ylim(-1, 1)
        axes.set_yticks([0], ["0"])
        axes.text(0.5, 0.7, "zero in every iteration", transform=axes.transAxes, ha="center", color="#444444")
        return
    smallest = 10.0 ** math.floor(math.log10(positive.min()))
    if (values <= 0).any():
        axes.set_yscale("symlog", linthresh=smallest, linscale=0.6)
        decades = np.arange(round(math.log10(smallest)), math.ceil(math.log10(positive.max())) + 1)
        every = max(1, math.ceil(len(decades) / 7))
        axes.set_yticks([0, *(10.0 ** decades[::every])])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=min(-0.25 * smallest, values.min()))
    else:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        if values.max() < 30 * values.min():  # too narrow for decades alone
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_locator(NullLocator())


def rewards(axes: Axes, history: History, names: Sequence[str]) -> None:
    """Training reward as a curve, held-out results as points joined by lines."""
    for index, name in enumerate(names):
        if METRICS[name].section != "held_out":
            lines(axes, history, [name])
            continue
        steps, values = points(history, name)
        look: dict[str, Any] = {"color": COLOURS[index], "linestyle": STYLES[index], "label": name}
        if len(steps):
            marker, face = ("s", "white") if index % 2 else ("o", COLOURS[index])
            size = 4 if len(steps) < 60 else 0
            axes.plot(steps, values, marker=marker, markersize=size, markerfacecolor=face, **look)
    axes.set_ylabel("reward, accuracy")


def stacked(axes: Axes, history: History, names: Sequence[str]) -> None:
    """Bars of one step each, one metric on another; a metric that a step lacks counts as zero."""
    steps = sorted(step for step, metrics in history.items() if any(name in metrics for name in names))
    low, high = steps[0], steps[-1]
    edges = np.arange(low - 0.5, high + 1)
    base = np.zeros(high - low + 1)
    for index, name in enumerate(names):
        values = np.zeros_like(base)
        at, found = points(history, name)
        values[at.astype(int) - low] = found
        look: dict[str, Any] = {"facecolor": COLOURS[index], "label": name}
        if len(at):
            axes.stairs(base + values, edges, baseline=base, fill=True, **look)
        base = base + values
    axes.set_ylim(0, None if base.max() > 0 else 1)
    axes.set_ylabel(METRICS[names[0]].unit)


PANELS = (
    Panel("Reward", ("reward/mean", "held_out/reward", "held_out/accuracy"), rewards),
    Panel(
        "Gap between learner and sampler",
        ("gap/p50", "gap/p90", "gap/p99", "gap/p999", "gap/max", "gap/abs_mean"),
        log_lines,
    ),
    Panel(
        "Tokens that the bounds touch",
        ("gap/beyond_clip", "correction/clipped", "policy/clip_low_share", "policy/clip_high_share"),
        lines,
    ),
    Panel(
        "Importance ratios",
        ("gap/ratio_mean", "policy/ratio_mean", "correction/weight_mean", "gap/ess"),
        lines,
    ),
    Panel("Divergence", ("gap/k3", "policy/approx_kl"), log_lines),
    Panel("Entropy", ("policy/entropy",), lines),
    Panel("Policy loss", ("policy/loss",), lines),
    Panel("Gradient norm", ("policy/grad_norm",), log_lines),
    Panel("Response length", ("response/length_mean", "response/length_max", "held_out/length_mean"), lines),
    Panel(
        "Responses cut off or not scored",
        ("response/truncated", "held_out/truncated", "reward/error_rate", "held_out/error_rate"),
        lines,
    ),
    Panel("Groups", ("groups/kept", "groups/dropped_constant", "groups/dropped_error"), stacked),
    Panel(
        "Time of an iteration",
        tuple(
            f"time/{stage}"
            for stage in ("generate", "reward", "score", "update", "sync", "evaluate", "checkpoint")
        ),
        stacked,
    ),
    Panel("Throughput", ("rate/tokens_per_second",), lines),
    Panel("Memory", ("memory/driver", "memory/learner", "memory/sampler", "memory/weight_sync"), lines),
)


def _value_axis(axes: Axes, names: Sequence[str]) -> None:
    units = {METRICS[name].unit for name in names}
    if units == {"share"}:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        axes.set_ylabel("share of tokens" if "gap/beyond_clip" in names else "share")
    else:
        axes.set_ylabel(units.pop() if len(units) == 1 else "")


def _arrange(figure: Figure, axes: Axes) -> None:
    """The legend above the axes, and room around them. matplotlib's constrained layout measures all text several times
    over; here what stands left of the axes is measured once, and the rest has a size that is known before.
    """
    legend = figure.legend(loc="upper left", ncols=_COLUMNS, borderaxespad=0.2)
    rows = math.ceil(len(legend.get_texts()) / _COLUMNS)
    figure.subplots_adjust(
        right=1 - _RIGHT, bottom=0.44 / _INCHES[1], top=1 - (0.24 + 0.2 * rows) / _INCHES[1]
    )
    beside = axes.yaxis.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
    if beside is not None:
        figure.subplots_adjust(left=figure.subplotpars.left - beside.x0 / figure.bbox.width + _LEFT)


def _limit_steps(axes: Axes, steps: list[int]) -> None:
    low, high = min(steps), max(steps)
    margin = max(0.6, 0.015 * (high - low))
    axes.set_xlim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def _moving_average(values: np.ndarray) -> np.ndarray:
    """Mean of each value and its neighbours, as many on each side as there are up to the reach."""
    reach = max(4, len(values) // 100)
    sums = np.cumsum(np.concatenate([[0.0], values]))
    here = np.arange(len(values))
    starts, ends = np.maximum(here - reach, 0), np.minimum(here + reach + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def _in_words(title: str, history: History, names: Sequence[str]) -> str:
    parts = []
    for name in names:
        _, values = points(history, name)
        unit = METRICS[name].unit
        if len(values) == 1:
            parts.append(f"{name} is {quantity(values[0], unit)}")
        else:
            parts.append(
                f"{name} goes from {quantity(values[0], unit)} to {quantity(values[-1], unit)},"
                f" between {quantity(values.min(), unit)} and {quantity(values.max(), unit)}"
            )
    return f"{title} by iteration: " + "; ".join(parts) + "."

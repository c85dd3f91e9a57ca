"""The figures of a diagnosis, in a form that fits a paper: PNG at 200 dots per inch and PDF, one column wide or two."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from rl.diagnosis.boundaries import LayerResult
from rl.diagnosis.compare import PARTS
from rl.diagnosis.statistics import Bounds
from rl.diagnosis.summary import AttributionStep, Gap, RoutingResult, Summary
from rl.evaluation.estimators import Estimate
from rl.records.charts import COLOURS, STYLES

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,  # TrueType, as journals ask
    "savefig.dpi": 200,
}
_SMALLEST = 1e-12  # nats; the place of a gap of zero on a logarithmic axis
_NAMES = {"fc1": "FC1", "swiglu": "SwiGLU", "fc2": "FC2", "logp": "token logp"}


def draw_all(summary: Summary, folder: Path) -> list[tuple[str, str]]:
    """Write NAME.png and NAME.pdf of every figure that the studies give; returns (name, caption)."""
    plans: list[tuple[str, bool, Callable[[], Figure], str]] = [
        ("tail", bool(summary.gaps), lambda: tail(summary.gaps, summary.bounds), _TAIL),
        (
            "depth",
            bool(summary.routing),
            lambda: depth(summary.routing, summary.bootstrap.confidence),
            _DEPTH,
        ),
        ("scale", bool(summary.scale), lambda: scale(summary), _SCALE),
        (
            "boundaries",
            any(layer.first for verdict in summary.verdicts for layer in verdict.layers),
            lambda: boundaries(summary),
            _BOUNDARIES,
        ),
        ("attribution", summary.attribution is not None, lambda: attribution(summary), _ATTRIBUTION),
    ]
    drawn = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, wanted, make, caption in plans:
        if wanted:
            with matplotlib.rc_context(_STYLE):
                figure = make()
                figure.savefig(folder / f"{name}.png")
                figure.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None})
            drawn.append((name, caption))
    return drawn


_TAIL = (
    "Share of response tokens whose absolute difference of log-probability exceeds a value. Dotted: the smallest"
    " difference with which a ratio alone leaves the clip range. The label gives the 99th percentile, which the marker"
    " shows."
)
_DEPTH = (
    "Relative L2 difference of the outputs of FC1 and FC2 between the engines, with the experts of the layer fixed to"
    " be the same, and of the layer's input. Bands: bootstrap intervals over prompts."
)
_SCALE = (
    "Left: the tail, before and after a single field of the right engine's specification changes. Right: relative L2"
    " of FC2's output at fixed experts."
)
_BOUNDARIES = (
    "On the same input: relative L2 difference of each part of the layer between the engines, in the order of"
    " computing. White: equal bit for bit. Dots: differs in memory, in no value."
)
_ATTRIBUTION = (
    "Mean absolute difference of log-probability while the right engine goes from one specification to the other, a"
    " field at a time, in the order of declaration and the other way round. Whiskers: bootstrap intervals of the step."
    " Fields that can change no value of a forward pass are left out."
)


def tail(gaps: Sequence[Gap], bounds: Bounds) -> Figure:
    figure = Figure(figsize=(4.6, 3.1 + 0.16 * len(gaps)), layout="constrained")
    _tail(figure.add_subplot(), gaps, bounds)
    figure.legend(loc="outside upper left", ncols=1)
    return figure


def _tail(axes: Axes, gaps: Sequence[Gap], bounds: Bounds) -> None:
    smallest = _smallest(gaps)
    for index, gap in enumerate(gaps):
        colour = COLOURS[index % len(COLOURS)]
        distances = np.maximum(gap.distances, smallest)
        share = 1 - np.arange(len(distances)) / len(distances)
        p99 = gap.statistics["p99"].value
        axes.step(
            distances,
            share,
            where="pre",
            color=colour,
            linestyle=STYLES[index % len(STYLES)],
            label=f"{gap.label}: P99 {p99:.3g}",
        )
        axes.plot(
            [max(p99, smallest)],
            [0.01],
            marker=MARKERS[index % len(MARKERS)],
            color=colour,
            markeredgecolor="white",
            markersize=6,
        )
    least = min(-math.log1p(-bounds.low), math.log1p(bounds.high))
    axes.axvline(least, color="#888888", linestyle=":", linewidth=1)
    axes.annotate(
        f"clip {1 - bounds.low:g}, {1 + bounds.high:g}",
        (least, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(3, 0),
        textcoords="offset points",
        rotation=90,
        ha="left",
        va="bottom",
        fontsize=6.5,
        color="#666666",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left=smallest, right=max(2 * max(gap.distances[-1] for gap in gaps), 3 * least))
    axes.set_ylim(0.5 / max(gap.tokens for gap in gaps), 1.4)
    axes.set_xlabel("absolute difference of log-probability (nats)")
    axes.set_ylabel("share of tokens beyond")


def _smallest(gaps: Sequence[Gap]) -> float:
    """Where the logarithmic axis begins: a decade at or below the smallest median that is not zero."""
    medians = [gap.statistics["p50"].value for gap in gaps]
    positive = [value for value in medians if value > _SMALLEST] or [1e-6]
    return 10.0 ** (math.floor(math.log10(min(positive))) - 1)


def depth(results: Sequence[RoutingResult], confidence: float) -> Figure:
    figure = Figure(figsize=(7.0, 2.9), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, name, title in zip(
        axes, ("x", "fc1", "fc2"), ("input of the layer", "FC1 output", "FC2 output"), strict=True
    ):
        for index, result in enumerate(results):
            _band(axis, result, name, index)
        axis.set_title(title)
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    _relative_axis(axes[0])
    axes[0].set_ylabel(f"relative L2 ({100 * confidence:.0f} % band)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(3, len(labels)))
    return figure


def _band(axes: Axes, result: RoutingResult, name: str, index: int) -> None:
    layers = [one.layer for one in result.depths]
    found: list[Estimate] = [getattr(one, name) for one in result.depths]
    colour = COLOURS[index % len(COLOURS)]
    axes.fill_between(
        layers, [e.low for e in found], [e.high for e in found], color=colour, alpha=0.18, linewidth=0
    )
    axes.plot(
        layers,
        [e.value for e in found],
        color=colour,
        linestyle=STYLES[index % len(STYLES)],
        marker=MARKERS[index % len(MARKERS)],
        label=result.label,
    )


def _relative_axis(axes: Axes) -> None:
    """Logarithmic where all is positive; else linear below the smallest decade, so that zero has a place."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.figure.axes[0].lines])
    for other in axes.figure.axes[1:]:
        for line in other.lines:
            values = np.concatenate([values, np.asarray(line.get_ydata(), float)])
    positive = values[values > 0]
    if not len(positive):
        axes.set_ylim(-0.1, 1)
        return
    smallest = 10.0 ** math.floor(math.log10(positive.min()))
    if (values <= 0).any():
        axes.set_yscale("symlog", linthresh=smallest, linscale=0.5)
        axes.set_ylim(bottom=-0.3 * smallest)
        top = math.ceil(math.log10(positive.max()))
        decades = np.arange(round(math.log10(smallest)), top + 1)
        every = max(1, math.ceil(len(decades) / 6))
        axes.set_yticks([0, *(10.0 ** decades[::every].astype(float))])
    else:
        axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())


def scale(summary: Summary) -> Figure:
    figure = Figure(figsize=(7.0, 3.1 + 0.17 * len(summary.scale)), layout="constrained")
    left, right = figure.subplots(1, 2)
    base = summary.scale[0]
    gaps = [
        _renamed(base.base, "no change"),
        *(_renamed(one.changed, one.change) for one in summary.scale),
    ]
    _tail(left, gaps, summary.bounds)
    routes = [
        _as(base.base_routing, "no change"),
        *(_as(o.changed_routing, o.change) for o in summary.scale),
    ]
    for index, result in enumerate(routes):
        _band(right, result, "fc2", index)
    values = [one.fc2.value for result in routes for one in result.depths]
    right.set_yscale("log" if min(values) > 0 else "linear")
    right.set_ylim(bottom=None if min(values) > 0 else 0)
    right.set_title("FC2 output, experts fixed")
    right.set_xlabel("layer")
    right.set_ylabel("relative L2")
    right.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    left.set_title("log-probabilities")
    handles, labels = left.get_legend_handles_labels()
    title = f"both engines {base.base.label}, the right one with"
    figure.legend(handles, labels, loc="outside upper center", ncols=1, title=title, title_fontsize=7.5)
    return figure


def _renamed(gap: Gap, label: str) -> Gap:
    return Gap(label, gap.tokens, gap.prompts, gap.statistics, gap.increase, gap.distances)


def _as(result: RoutingResult, label: str) -> RoutingResult:
    return RoutingResult(label, result.depths, result.invalid_experts, result.tokens)


def boundaries(summary: Summary) -> Figure:
    """One panel for each condition with a difference: layers across, parts down."""
    wrong = [verdict for verdict in summary.verdicts if any(layer.first for layer in verdict.layers)]
    columns = min(2, len(wrong))
    rows = math.ceil(len(wrong) / columns)
    figure = Figure(figsize=(3.6 * columns + 0.8, 2.6 * rows), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
    image = None
    for axes, verdict in zip(panels, wrong, strict=False):
        image = _heat(axes, verdict.layers)
        axes.set_title(verdict.label, fontsize=7.5)
    for axes in panels[len(wrong) :]:
        axes.set_axis_off()
    if image is not None:
        figure.colorbar(image, ax=list(panels), label="relative L2 (log10)", shrink=0.85)
    return figure


def _heat(axes: Axes, layers: Sequence[LayerResult]) -> Any:
    parts = [part for part in PARTS if any(d.part == part for layer in layers for d in layer.differences)]
    values = np.full((len(parts), len(layers)), np.nan)
    for column, layer in enumerate(layers):
        for difference in layer.differences:
            row = parts.index(difference.part)
            if difference.relative_l2 > 0:
                values[row, column] = math.log10(difference.relative_l2)
            elif difference.differs:
                axes.plot(column, row, ".", color="#222222", markersize=4)
    image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=-6, vmax=0, interpolation="nearest")
    axes.set_yticks(range(len(parts)), [_NAMES.get(part, part) for part in parts])
    axes.set_xticks(range(len(layers)), [str(layer.layer) for layer in layers])
    axes.set_xlabel("layer")
    axes.grid(False)
    return image


def attribution(summary: Summary) -> Figure:
    """Two waterfalls, one a direction, steps from top to bottom."""
    result = summary.attribution
    assert result is not None
    rows = [
        sum(not step.computes_alike for step in steps) + 1 for steps in (result.forwards, result.backwards)
    ]
    figure = Figure(figsize=(7.4, 1.0 + 0.21 * sum(rows)), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True, height_ratios=rows)
    for axis, steps, title in (
        (axes[0], result.forwards, f"forwards: {result.left} to {result.right}, in the order of declaration"),
        (axes[1], result.backwards, "backwards: the same, last field first"),
    ):
        _waterfall(axis, steps, result.start_abs_mean)
        axis.set_title(title, loc="left")
    axes[1].set_xlabel("mean absolute difference of log-probability (nats)")
    return figure


def _waterfall(axes: Axes, steps: Sequence[AttributionStep], start: float) -> None:
    labels = ["same spec in both engines"]
    axes.barh(0, start, color="#bbbbbb", height=0.7)
    level = start
    counted = [step for step in steps if not step.computes_alike]
    for row, step in enumerate(counted, start=1):
        change = step.abs_mean - level
        colour = "#d55e00" if change > 0 else "#0072b2"
        axes.barh(row, change, left=level, color=colour, height=0.7)
        low, high = level + step.move.low, level + step.move.high
        axes.plot([low, high], [row, row], color="#222222", linewidth=0.8)
        axes.plot([level, level], [row - 1 + 0.35, row - 0.35], color="#888888", linewidth=0.6)
        labels.append("\n".join(step.fields) if len(step.fields) < 3 else _short(step.fields))
        level = step.abs_mean
    axes.set_yticks(range(len(labels)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)


def _short(fields: Sequence[str]) -> str:
    return f"{fields[-1]}\nand {len(fields) - 1} that it makes possible"

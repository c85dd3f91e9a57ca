"""The tables of a diagnosis, as text: for the page and the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rl.diagnosis.boundaries import LayerResult
from rl.diagnosis.summary import AttributionResult, Gap, RoutingResult, ScaleResult, Verdict
from rl.evaluation.estimators import Estimate

# statistic -> heading and unit
STATISTICS = {
    "p50": ("P50 of |d|", "nat"),
    "p90": ("P90 of |d|", "nat"),
    "p99": ("P99 of |d|", "nat"),
    "p999": ("P99.9 of |d|", "nat"),
    "max": ("largest |d|", "nat"),
    "beyond_clip": ("beyond clip", "%"),
    "k3": ("k3", "nat"),
    "ratio_mean": ("mean exp(d)", ""),
    "ess": ("effective sample size, share", ""),
}


@dataclass(frozen=True)
class Table:
    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def interval(estimate: Estimate, unit: str = "", signed: bool = False, digits: int = 4) -> str:
    """``0.127 [0.101, 0.155]``; shares in percent."""
    factor, sign = (100 if unit == "%" else 1), ("+" if signed else "")
    middle, low, high = (
        f"{factor * part:{sign}.{digits}g}" for part in (estimate.value, estimate.low, estimate.high)
    )
    return f"{middle} [{low}, {high}]"


def gap_tables(gaps: list[Gap], confidence: float, digits: int = 4) -> list[Table]:
    """The gap of every condition, and its increase over the first: a row a statistic, a column a condition."""
    percent = f"{100 * confidence:.0f} % intervals over prompts"
    rows: list[tuple[str, ...]] = [
        (_heading(name), *(interval(gap.statistics[name], unit, digits=digits) for gap in gaps))
        for name, (_, unit) in STATISTICS.items()
    ]
    labels = tuple(gap.label for gap in gaps)
    tables = [Table(f"Gap between the engines, {percent}", ("of every token's d", *labels), rows)]
    increases = [gap for gap in gaps if gap.increase]
    if increases:
        rows = [
            (_heading(name), *(interval(gap.increase[name], unit, True, digits) for gap in increases))
            for name, (_, unit) in STATISTICS.items()
        ]
        labels = tuple(gap.label for gap in increases)
        title = f"Paired increase over {gaps[0].label}, {percent}"
        tables.append(Table(title, ("of every token's d", *labels), rows))
    return tables


def _heading(name: str) -> str:
    title, unit = STATISTICS[name]
    return f"{title}, {unit}" if unit else title


def routing_tables(results: list[RoutingResult]) -> list[Table]:
    """One for each condition, a row a layer."""
    headings = (
        "layer",
        "input, relative L2",
        "FC1, relative L2",
        "FC2, relative L2",
        "tokens routed otherwise, %",
    )
    return [
        Table(
            f"{result.label}: {result.tokens} tokens, {result.invalid_experts} invalid experts",
            headings,
            [
                (
                    str(one.layer),
                    interval(one.x),
                    interval(one.fc1),
                    interval(one.fc2),
                    f"{100 * one.other_experts:.3g}",
                )
                for one in result.depths
            ],
        )
        for result in results
    ]


def scale_table(results: list[ScaleResult]) -> Table:
    """The gap and FC2's outputs without and with each change."""
    rows: list[tuple[str, ...]] = []
    for result in results:
        rows.append(
            (
                result.change,
                interval(result.base.statistics["p99"]),
                interval(result.changed.statistics["p99"]),
                interval(result.changed.increase["p99"], signed=True),
                interval(result.changed.increase["beyond_clip"], "%", signed=True),
                _range([one.fc2.value for one in result.base_routing.depths]),
                _range([one.fc2.value for one in result.changed_routing.depths]),
            )
        )
    return Table(
        f"A single field of the right engine's specification, both engines otherwise under {results[0].base.label}",
        (
            "field",
            "P99 before, nat",
            "P99 after, nat",
            "moved by, nat",
            "beyond clip moved by, %",
            "FC2 relative L2 before",
            "after",
        ),
        rows,
    )


def _range(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"


def boundary_table(verdict: Verdict) -> Table:
    """Layer by layer: the first part that differs, and how far the parts do."""
    headings = (
        "layer",
        "first part that differs",
        "boundary",
        "fields",
        "FC1",
        "FC2",
        "combined",
        "logp moved, mean nat",
    )
    return Table(verdict.label, headings, [_boundary_row(layer) for layer in verdict.layers])


def _boundary_row(layer: LayerResult) -> tuple[str, ...]:
    size = {d.part: d.relative_l2 for d in layer.differences}
    shown = [f"{size[part]:.3g}" if part in size else "-" for part in ("fc1", "fc2", "combined")]
    fields = ", ".join(f.field for f in layer.fields) or "-"
    moved = f"{layer.logp['abs_mean']:.3g}" if layer.logp else "-"
    return (str(layer.layer), layer.first or "none", layer.boundary or "-", fields, *shown, moved)


def size_of(result: AttributionResult) -> str:
    return f"{result.prompts} prompts, {result.tokens:,} response tokens"


def attribution_tables(result: AttributionResult) -> list[Table]:
    """One for each direction, a row a step."""
    headings = ("field", "mean |d| after, nat", "moved by", "P99 after, nat", "moved by")
    tables = []
    for title, steps in (("forwards", result.forwards), ("backwards", result.backwards)):
        rows: list[tuple[str, ...]] = [
            ("same spec in both engines", f"{result.start_abs_mean:.4g}", "", f"{result.start_p99:.4g}", "")
        ]
        for step in steps:
            alike = "no value can change" if step.computes_alike else ""
            rows.append(
                (
                    "; ".join(step.fields),
                    f"{step.abs_mean:.4g}",
                    alike or interval(step.move, signed=True),
                    f"{step.p99:.4g}",
                    "" if alike else interval(step.p99_move, signed=True),
                )
            )
        tables.append(Table(f"{result.left} to {result.right}, {title} ({size_of(result)})", headings, rows))
    return tables

"""What a diagnosis leaves behind: results.json, figures, and a page that needs nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl.diagnosis import tables
from rl.diagnosis.figures import draw_all
from rl.diagnosis.page import render
from rl.diagnosis.session import Outcome
from rl.diagnosis.summary import Gap, Summary
from rl.records.provenance import read_run_json
from rl.records.report import describe_launch
from rl.run_folder import write_atomically

FIGURES = "figures"


def write_results(outcome: Outcome, summary: Summary) -> Path:
    """Write results.json, figures/ and report.html; returns the path of the page."""
    folder = outcome.folder.path
    write_atomically(folder / "results.json", json.dumps(to_json(outcome, summary), indent=1) + "\n")
    drawn = draw_all(summary, folder / FIGURES)
    write_atomically(folder / "report.html", page(outcome, summary, drawn))
    return folder / "report.html"


def to_json(outcome: Outcome, summary: Summary) -> dict[str, Any]:
    """All numbers of the summary; the tokens themselves stand in the Parquet files of pieces/."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(summary), default=lambda _: None))
    for gap in [*plain["gaps"], *(one[key] for one in plain["scale"] for key in ("base", "changed"))]:
        del gap["distances"]
    specs = {
        label: [side.describe() for side in maps or ()] for label, maps in outcome.plan.conditions.items()
    }
    return {
        "format": 1,
        "model": {"folder": str(outcome.plan.model), "digest": outcome.plan.model_digest},
        "sequences": {"count": len(outcome.corpus.sequences), "tokens": outcome.corpus.tokens},
        "conditions": specs,
        **plain,
    }


def page(outcome: Outcome, summary: Summary, drawn: list[tuple[str, str]]) -> str:
    folder = outcome.folder.path
    figures = {
        name: {"name": name, "caption": caption, "png": (folder / FIGURES / f"{name}.png").read_bytes()}
        for name, caption in drawn
    }
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    launches = read_run_json(outcome.folder).get("launches", [])
    corpus = outcome.corpus
    return render(
        {
            "title": f"Diagnosis of {summary.title}",
            "state": f"{len(corpus.sequences)} sequences of {len(set(corpus.prompts))} prompts, {corpus.tokens:,}"
            f" response tokens; model {outcome.plan.model.name}",
            **_result(summary.gaps),
            "notes": summary.notes,
            "sections": _sections(summary, figures),
            "config": config.strip(),
            "launches": [describe_launch(launch) for launch in launches],
        }
    )


def _result(gaps: list[Gap]) -> dict[str, str]:
    if not gaps:
        return {"result": "The gap itself was not measured (study=frozen)", "result_note": ""}
    p99 = [f"{gap.label} {tables.interval(gap.statistics['p99'], digits=3)}" for gap in gaps]
    beyond = [f"{gap.label} {100 * gap.statistics['beyond_clip'].value:.3g} %" for gap in gaps]
    increases = [
        f"{gap.label} {tables.interval(gap.increase['p99'], signed=True, digits=3)}"
        for gap in gaps
        if gap.increase
    ]
    note = f"Tokens that leave the clip range by numerics alone: {', '.join(beyond)}."
    if increases:
        note = f"Paired increase of P99 over {gaps[0].label}: {', '.join(increases)}. {note}"
    return {"result": f"P99 of |Δ log p|, nats: {', '.join(p99)}", "result_note": note}


_BOUNDARIES = (
    "Both engines compute one layer on the left engine's input, experts and coefficients. What each of them held and"
    " computed is compared part by part, with the other engine's and with the reference of the spec that it says it"
    " runs. The last boundary is the left engine's log-probabilities with the right engine's output of this one layer"
    " in place of its own."
)
_ROUTING = (
    "At each layer both engines take the left engine's experts; input and router coefficients are each engine's own,"
    " with all the differences of the layers before. What is left between their FC1 and FC2 outputs is not routing."
    " The last column counts tokens for which the right engine would have taken other experts."
)
_ATTRIBUTION = (
    "The left engine stays under its spec, the right one goes to its own, a field at a time. Fields that cannot change"
    " alone change together. Moves depend on the order, and where the gap under one spec is large already they are"
    " differences of large numbers: read them with their intervals."
)


def _sections(summary: Summary, figures: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    confidence, found = summary.bootstrap.confidence, []
    if summary.gaps:
        own = tables.gap_tables(summary.gaps, confidence)
        found.append(_section("Frozen policy", _frozen_text(summary), figures, "tail", own))
    if summary.verdicts:
        own = [tables.boundary_table(verdict) for verdict in summary.verdicts]
        section = _section("Three boundaries on the same input", _BOUNDARIES, figures, "boundaries", own)
        section["verdicts"] = [
            {
                "label": verdict.label,
                "text": verdict.text,
                "same": all(layer.first is None for layer in verdict.layers),
            }
            for verdict in summary.verdicts
        ]
        found.append(section)
    if summary.routing:
        own = tables.routing_tables(summary.routing)
        found.append(_section("Routing control", _ROUTING, figures, "depth", own))
    if summary.scale:
        found.append(_section("Scale control", "", figures, "scale", [tables.scale_table(summary.scale)]))
    if summary.attribution:
        own = tables.attribution_tables(summary.attribution)
        found.append(_section("Attribution", _ATTRIBUTION, figures, "attribution", own))
    return found


def _frozen_text(summary: Summary) -> str:
    bounds, bootstrap = summary.bounds, summary.bootstrap
    return (
        f"d = log p({summary.engines[0]}) - log p({summary.engines[1]}) of every response token, by teacher forcing."
        f" Intervals: {bootstrap.resamples} resamples of prompts, {100 * bootstrap.confidence:.0f} % percentile"
        " interval; with few prompts those of tail quantiles are too narrow. Beyond clip: tokens whose ratio exp(d)"
        f" alone leaves [{1 - bounds.low:g}, {1 + bounds.high:g}]."
    )


def _section(
    title: str, text: str, figures: dict[str, dict[str, Any]], name: str, own: list[tables.Table]
) -> dict[str, Any]:
    return {
        "title": title,
        "text": [text] if text else [],
        "verdicts": [],
        "figures": [figures[name]] if name in figures else [],
        "tables": own,
    }

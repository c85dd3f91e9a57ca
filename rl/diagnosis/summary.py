"""The numbers of a diagnosis, from its stored pieces: what the report, the figures and the gate are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.diagnosis.boundaries import LayerResult
from rl.diagnosis.config import DiagnoseConfig
from rl.diagnosis.corpus import Corpus
from rl.diagnosis.session import Outcome
from rl.diagnosis.statistics import (
    Bootstrap,
    Bounds,
    Clustered,
    estimates,
    paired_increase,
    ratio_of_sums,
)
from rl.diagnosis.store import Piece
from rl.diagnosis.studies import logp_gap
from rl.diagnosis.verdict import summary_of
from rl.evaluation.estimators import Estimate

Statistics = dict[str, Estimate]


@dataclass(frozen=True)
class Gap:
    """A condition under the study frozen. increase: against the first condition, paired; empty for that one itself.

    distances: |d| of every token, ascending, in nats.
    """

    label: str
    tokens: int
    prompts: int
    statistics: Statistics
    increase: Statistics
    distances: np.ndarray


@dataclass(frozen=True)
class Depth:
    """Relative L2 of one layer's input, FC1 and FC2 output between the engines, and the share of the compared tokens
    for which the right engine's router would take other experts."""

    layer: int
    x: Estimate
    fc1: Estimate
    fc2: Estimate
    other_experts: float


@dataclass(frozen=True)
class RoutingResult:
    label: str
    depths: list[Depth]
    invalid_experts: int
    tokens: int


@dataclass(frozen=True)
class ScaleResult:
    """change: the single field of the right engine's spec; base, changed: without it and with it."""

    change: str
    base: Gap
    changed: Gap
    base_routing: RoutingResult
    changed_routing: RoutingResult


@dataclass(frozen=True)
class Verdict:
    """What the study boundaries says of a condition."""

    label: str
    layers: list[LayerResult]
    text: str


@dataclass(frozen=True)
class AttributionStep:
    """fields: those that change here, as FIELD: LEFT -> RIGHT. abs_mean, p99: of |d|, after the step; move, p99_move:
    what it added. computes_alike: no value of a forward pass can change."""

    fields: tuple[str, ...]
    abs_mean: float
    p99: float
    move: Estimate
    p99_move: Estimate
    computes_alike: bool


@dataclass(frozen=True)
class AttributionResult:
    left: str
    right: str
    prompts: int
    tokens: int
    start_abs_mean: float
    start_p99: float
    forwards: list[AttributionStep]
    backwards: list[AttributionStep]


@dataclass(frozen=True)
class Summary:
    title: str
    engines: tuple[str, str]
    bounds: Bounds
    bootstrap: Bootstrap
    gaps: list[Gap] = field(default_factory=list)
    routing: list[RoutingResult] = field(default_factory=list)
    scale: list[ScaleResult] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    attribution: AttributionResult | None = None
    notes: list[str] = field(default_factory=list)


def summarise(outcome: Outcome) -> Summary:
    """All statistics and intervals."""
    plan, pieces = outcome.plan, outcome.pieces
    config, objective = plan.config, plan.config.algorithm.objective
    bounds = Bounds(objective.clip_low, objective.clip_high)
    bootstrap = Bootstrap(config.resamples, config.confidence, config.run.seed)
    return Summary(
        f"{config.run.name}: {config.engines[0]} against {config.engines[1]}",
        config.engines,
        bounds,
        bootstrap,
        _gaps(pieces.get("frozen", {}), bounds, bootstrap),
        [_routing(label, piece, bootstrap) for label, piece in pieces.get("routing", {}).items()],
        _scale(pieces.get("scale", {}), config.scale.spec, plan.changes, bounds, bootstrap),
        [verdict(label, piece) for label, piece in pieces.get("boundaries", {}).items()],
        next((_attribution(piece, bootstrap) for piece in pieces.get("attribution", {}).values()), None),
        [
            *plan.notes,
            *_sizes(config, plan.study, outcome.corpus),
            *other_backends(pieces, config.scale.spec, plan.changes),
        ],
    )


def _sizes(config: DiagnoseConfig, study: Sequence[str], corpus: Corpus) -> list[str]:
    """Which part of the sequences the studies were made on that do not take all of them."""
    prompts, longest = len(set(corpus.prompts)), max(map(len, corpus.sequences))
    found = [
        f"{name}: the first {own.prompts} of {prompts} prompts ({name}.prompts)"
        for name, own in (("boundaries", config.boundaries), ("attribution", config.attribution))
        if name in study and own.prompts < prompts
    ]
    if {"routing", "scale"} & set(study) and config.routing.tokens < longest:
        found.append(f"routing: at most {config.routing.tokens} tokens of each sequence (routing.tokens)")
    return [f"Made on a part of the text: {'; '.join(found)}."] if found else []


def other_backends(
    pieces: Mapping[str, Mapping[str, Piece]], base: str, changes: Mapping[str, str]
) -> list[str]:
    """Moves that hold more than fields, as another implementation computes the right engine's experts behind them.

    pieces: study -> condition -> piece. base, changes: of the study scale, the condition and, by change, the others.
    """
    scale, moves = pieces.get("scale", {}), []
    for change, label in changes.items():
        if scale:
            before, after = (scale[own][0].get("backends", ["", ""])[1] for own in (base, label))
            moves.append((f"scale, {change}", before, after))
    for result, _ in pieces.get("attribution", {}).values():
        columns = {"forwards": result["start"], "backwards": result["start"]}
        for step in result["steps"]:
            direction, known = step["direction"], result.get("backends", {})
            before, after = (known.get(column, "") for column in (columns[direction], step["column"]))
            fields = ", ".join(field["field"] for field in step["fields"])
            moves.append((f"attribution {direction}, {fields}", before, after))
            columns[direction] = step["column"]
    found = [
        f"{move}: from {before} to {after}" for move, before, after in moves if before and before != after
    ]
    text = "The right engine's experts are computed by another back end, and the move holds that difference, too: "
    return [f"{text}{'; '.join(found)}."] if found else []


def _gaps(pieces: Mapping[str, Piece], bounds: Bounds, bootstrap: Bootstrap) -> list[Gap]:
    data = {label: _clustered(table) for label, (_, table) in pieces.items()}
    first = next(iter(data.values()), None)
    found = []
    for label, own in data.items():
        increase = {} if own is first or first is None else paired_increase(first, own, bounds, bootstrap)
        found.append(_gap(label, own, increase, bounds, bootstrap))
    return found


def _gap(label: str, data: Clustered, increase: Statistics, bounds: Bounds, bootstrap: Bootstrap) -> Gap:
    statistics = estimates(data, bounds, bootstrap)
    return Gap(label, data.values.size, data.count, statistics, increase, np.sort(np.abs(data.values)))


def _clustered(table: Mapping[str, np.ndarray], right: str = "right_logp") -> Clustered:
    return Clustered(logp_gap(table, right), table["prompt"])


def _routing(label: str, piece: Piece, bootstrap: Bootstrap) -> RoutingResult:
    result, table = piece
    depths = []
    for layer in result["layers"]:
        own = table["layer"] == layer
        relative = {
            name: ratio_of_sums(
                table[f"{name}_difference2"][own], table[f"{name}_norm2"][own], bootstrap, root=True
            )
            for name in ("x", "fc1", "fc2")
        }
        other = float(table["other_experts"][own].sum() / table["tokens"][own].sum())
        depths.append(Depth(layer, relative["x"], relative["fc1"], relative["fc2"], other))
    return RoutingResult(label, depths, result["invalid_experts"], result["tokens"])


def _scale(
    pieces: Mapping[str, Piece],
    base: str,
    changes: Mapping[str, str],
    bounds: Bounds,
    bootstrap: Bootstrap,
) -> list[ScaleResult]:
    if not pieces:
        return []
    before = _clustered(pieces[base][1])
    base_gap = _gap(base, before, {}, bounds, bootstrap)
    found = []
    for change, label in changes.items():
        after = _clustered(pieces[label][1])
        increase = paired_increase(before, after, bounds, bootstrap)
        found.append(
            ScaleResult(
                change,
                base_gap,
                _gap(label, after, increase, bounds, bootstrap),
                _routing(base, pieces[f"routing {base}"], bootstrap),
                _routing(label, pieces[f"routing {label}"], bootstrap),
            )
        )
    return found


def verdict(label: str, piece: Piece) -> Verdict:
    layers = [LayerResult.from_dict(plain) for plain in piece[0]["layers"]]
    return Verdict(label, layers, summary_of(layers))


def _attribution(piece: Piece, bootstrap: Bootstrap) -> AttributionResult:
    result, table = piece
    bounds, shown = Bounds(), ("abs_mean", "p99")  # neither depends on the clip range
    alone = Bootstrap(1, bootstrap.confidence, bootstrap.seed)
    start = _clustered(table, result["start"])
    before = estimates(start, bounds, alone, shown)
    directions: dict[str, list[AttributionStep]] = {"forwards": [], "backwards": []}
    for direction, steps in directions.items():
        previous, column = start, result["start"]
        for step in result["steps"]:
            if step["direction"] != direction:
                continue
            now = _clustered(table, step["column"])
            moved = paired_increase(previous, now, bounds, bootstrap, shown)
            once = estimates(now, bounds, alone, shown)
            steps.append(
                AttributionStep(
                    tuple(f"{f['field']}: {f['left']} -> {f['right']}" for f in step["fields"]),
                    once["abs_mean"].value,
                    once["p99"].value,
                    moved["abs_mean"],
                    moved["p99"],
                    step["column"] == column,
                )
            )
            previous, column = now, step["column"]
    return AttributionResult(
        result["left"],
        result["right"],
        start.count,
        start.values.size,
        before["abs_mean"].value,
        before["p99"].value,
        directions["forwards"],
        directions["backwards"],
    )

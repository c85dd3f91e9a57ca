"""Three boundaries at one layer, on the very same input: where two engines part first, and what is responsible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from kernels.spec import ExecutionSpec, FieldDifference, spec_diff
from kernels.spec_diff.changes import single_changes
from rl.diagnosis.compare import PartDifference, compare
from rl.diagnosis.corpus import Corpus, flat
from rl.diagnosis.deviation import FEW, Deviation, deviation_of
from rl.diagnosis.engine import Given, Trace, shares_scales
from rl.diagnosis.reference import (
    Weights,
    changes_values,
    reference_trace,
    subset,
)


@dataclass(frozen=True)
class LayerResult:
    """One layer on the same input in both engines.

    differences: of every part. first: the first part that differs; None: none does. diff: of the specs. fields: those
    of them that move the first part on this input.
    """

    layer: int
    tokens: int
    left_spec: str
    right_spec: str
    differences: tuple[PartDifference, ...]
    first: str | None
    fields: tuple[FieldDifference, ...] = ()
    diff: tuple[FieldDifference, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    shared_scale: bool = False  # whether tokens of a batch share an activation scale in one of the specs
    left_backend: str = ""
    right_backend: str = ""
    logp: dict[str, float] = field(default_factory=dict)

    @property
    def boundary(self) -> str | None:
        found = [d.boundary for d in self.differences if d.part == self.first]
        return found[0] if found else None

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["fields"] = [f._asdict() for f in self.fields]
        plain["diff"] = [f._asdict() for f in self.diff]
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> LayerResult:
        """The inverse of `to_dict`, after JSON."""
        return cls(
            **{
                **plain,
                "differences": tuple(PartDifference(**part) for part in plain["differences"]),
                "fields": tuple(FieldDifference(**part) for part in plain["fields"]),
                "diff": tuple(FieldDifference(**part) for part in plain["diff"]),
                "deviations": tuple(
                    Deviation(**{**one, "named": tuple(one["named"])}) for one in plain["deviations"]
                ),
            }
        )


def examine_layer(
    left: Any,
    right: Any,
    layer: int,
    givens: Sequence[Given],
    masters: Weights,
    score_with: Callable[[int, list[torch.Tensor]], list[np.ndarray]],
    own_logp: Sequence[np.ndarray],
) -> LayerResult:
    """left, right: engines (or their actors). givens: the left engine's input of this layer, batch by batch; parts are
    compared on the first. score_with: the left engine's log-probabilities with other outputs of the layer.
    """
    given = givens[0]
    a, b = left.trace(layer, given), right.trace(layer, given)
    differences = compare(a, b)
    outputs = [b.combined, *(right.run_layer(layer, other) for other in givens[1:])]
    logp, moved = _logp_difference(a, outputs, left, layer, givens, score_with, own_logp)
    if logp is not None:
        differences.append(logp)
    first = next((d.part for d in differences if d.differs), None)
    references = {spec.fingerprint: reference_trace(spec, masters, given) for spec in (a.spec, b.spec)}
    deviations = []
    for name, engine, trace in (("left", left, a), ("right", right, b)):
        found = deviation_of(trace, references[trace.spec.fingerprint], engine, layer, given, masters)
        if found is not None:
            kind = engine.kind if isinstance(engine.kind, str) else engine.kind()
            deviations.append(Deviation(f"{name} ({kind})", *found))
    diff = spec_diff(a.spec, b.spec)
    fields: tuple[FieldDifference, ...] = ()
    if first is not None and diff:
        fields = responsible(a.spec, b.spec, first, masters, given, references)
    return LayerResult(
        layer,
        len(given.x),
        a.spec.name,
        b.spec.name,
        tuple(differences),
        first,
        fields,
        diff,
        tuple(deviations),
        any(shares_scales(spec) for spec in (a.spec, b.spec)),
        a.backend,
        b.backend,
        moved,
    )


def _logp_difference(
    trace: Trace,
    outputs: list[torch.Tensor],
    left: Any,
    layer: int,
    givens: Sequence[Given],
    score_with: Callable[[int, list[torch.Tensor]], list[np.ndarray]],
    own_logp: Sequence[np.ndarray],
) -> tuple[PartDifference | None, dict[str, float]]:
    """What the right engine's output of this one layer makes of the left engine's log-probabilities."""
    own = [trace.combined, *(left.run_layer(layer, other) for other in givens[1:])]
    if all(torch.equal(mine.float(), other.float()) for mine, other in zip(own, outputs, strict=True)):
        return PartDifference("logp", None, None, None, None, 0.0, 0.0), {
            "abs_mean": 0.0,
            "p99": 0.0,
            "max": 0.0,
        }
    before, after = flat(own_logp), flat(score_with(layer, outputs))
    distance = np.abs(after - before)
    moved = {
        "abs_mean": float(distance.mean()),
        "p99": float(np.quantile(distance, 0.99)),
        "max": float(distance.max()),
    }
    norm = float(np.linalg.norm(after - before) / np.linalg.norm(before))
    return PartDifference("logp", None, None, None, None, float((distance > 0).mean()), norm), moved


def responsible(
    left: ExecutionSpec,
    right: ExecutionSpec,
    part: str,
    masters: Weights,
    given: Given,
    references: dict[str, Trace],
) -> tuple[FieldDifference, ...]:
    """The differing fields that, changed alone in `left`, move `part` on this input.

    Tried on few tokens first, on all where no field moves it there. A field that cannot change alone brings the fewest
    others that make it possible; it counts where no field alone moves the part.
    """
    base = references[left.fingerprint]
    changed = [change for change in single_changes(left, right) if changes_values(change.difference.field)]
    # Log-probabilities are moved by what moves the layer's output.
    compared = "combined" if part == "logp" else part
    few = subset(given, torch.arange(min(FEW, len(given.x))))
    for own, expected in ((few, None), (given, base)):
        expected = expected or reference_trace(left, masters, own)
        found: dict[bool, list[FieldDifference]] = {True: [], False: []}  # by whether the field changes alone
        for change in changed:
            try:
                tried = reference_trace(change.spec, masters, own)
            except ValueError:
                continue
            moved = {d.part: d.differs for d in compare(expected, tried)}
            if moved.get(compared):
                found[not change.others].append(change.difference)
        if found[True] or found[False]:
            return tuple(found[True] or found[False])
    return ()


def examine(
    left: Any,
    right: Any,
    corpus: Corpus,
    temperature: float,
    layers: Sequence[int],
    masters: Callable[[int], Weights],
    progress: Callable[[int], None] = lambda done: None,
) -> list[LayerResult]:
    """`examine_layer` of every layer in `layers`, on the left engine's natural inputs."""
    own_logp, inputs = left.inputs(corpus, temperature, list(layers))

    def score_with(layer: int, outputs: list[torch.Tensor]) -> list[np.ndarray]:
        return left.score_with(corpus, temperature, layer, outputs)

    results = []
    for done, layer in enumerate(layers, start=1):
        results.append(examine_layer(left, right, layer, inputs[layer], masters(layer), score_with, own_logp))
        progress(done)
    return results

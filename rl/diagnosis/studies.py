"""The studies: what is asked of the engines, and what is kept of their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from kernels.spec import ExecutionSpec, FieldDifference, spec_diff
from kernels.spec_diff.changes import with_fields
from rl.diagnosis.corpus import Corpus, flat
from rl.diagnosis.engine import Imposed
from rl.diagnosis.pair import both
from rl.diagnosis.reference import changes_values
from rl.diagnosis.store import Piece

Engines = tuple[Any, Any]


def frozen(engines: Engines, corpus: Corpus, temperature: float) -> Piece:
    """Both engines' log-probabilities of every response token."""
    left, right = both(engines, "score", corpus, temperature)
    return {}, token_table(corpus, flat(left), flat(right))


def token_table(corpus: Corpus, left: np.ndarray, right: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "prompt": corpus.clusters(),
        "position": corpus.positions(),
        "token": corpus.response_tokens(),
        "left_logp": left,
        "right_logp": right,
    }


@dataclass(frozen=True, eq=False)
class LeftPass:
    """What the left engine gave in one pass: log-probabilities, routes, and the layers under its own experts."""

    logp: list[np.ndarray]
    routes: dict[int, np.ndarray]
    layers: dict[int, Imposed]


def left_pass(left: Any, corpus: Corpus, temperature: float, layers: Sequence[int], tokens: int) -> LeftPass:
    """The left engine's part of `routing`."""
    logp, routes = left.imposed(corpus, temperature, layers, None, corpus.choose(tokens))
    return LeftPass(logp, routes, {layer: left.take_imposed(layer) for layer in layers})


def routing(
    left: LeftPass, right: Any, corpus: Corpus, temperature: float, tokens: int
) -> tuple[Piece, dict[str, np.ndarray]]:
    """At each layer the left engine's experts in both, each with its own input and coefficients.

    Returns squared norms by layer and prompt, and the table of log-probabilities, which come with it.
    """
    chosen, layers = corpus.choose(tokens), list(left.layers)
    right_logp, _ = right.imposed(corpus, temperature, layers, left.routes, chosen)
    prompts = np.repeat(np.array(corpus.prompts), [len(own) for own in chosen])
    rows: list[dict[str, Any]] = []
    invalid = 0
    for layer, a in left.layers.items():
        b = right.take_imposed(layer)
        invalid += a.invalid + b.invalid
        rows += _norms(layer, a, b, prompts)
    table = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    result = {"layers": layers, "invalid_experts": invalid, "tokens": len(prompts)}
    return (result, table), token_table(corpus, flat(left.logp), flat(right_logp))


def _norms(layer: int, a: Imposed, b: Imposed, prompts: np.ndarray) -> list[dict[str, Any]]:
    """Of each prompt: squared norms of the left engine's tensors and of the differences, and tokens whose own experts
    differ. Where a spec multiplies the router coefficient ahead of FC2, FC2's outputs are compared with it in both.
    """
    weighted = a.weighted or b.weighted
    pairs = {
        "x": (a.x, b.x),
        "fc1": (a.fc1, b.fc1),
        "fc2": (a.contribution(weighted), b.contribution(weighted)),
    }
    other = (a.own.sort(1).values != b.own.sort(1).values).any(1).numpy()
    squares = {}
    for name, pair in pairs.items():
        mine, theirs = (tensor.double().flatten(1) for tensor in pair)
        squares[f"{name}_norm2"] = mine.square().sum(1).numpy()
        squares[f"{name}_difference2"] = (theirs - mine).square().sum(1).numpy()
    rows = []
    for prompt in np.unique(prompts):
        own = prompts == prompt
        rows.append(
            {
                "layer": layer,
                "prompt": int(prompt),
                "tokens": int(own.sum()),
                "other_experts": int(other[own].sum()),
                **{name: float(values[own].sum()) for name, values in squares.items()},
            }
        )
    return rows


@dataclass(frozen=True)
class Step:
    """Fields that take their values from the other spec, and the spec once they have."""

    fields: tuple[FieldDifference, ...]
    spec: ExecutionSpec


def path(left: ExecutionSpec, right: ExecutionSpec, backwards: bool = False) -> list[Step]:
    """From `left` to `right`, one differing field at a time, in the order of declaration or the other way round.

    A field that the others do not allow yet waits; where none can change alone, the smallest set that can changes.
    """
    left_over = list(spec_diff(left, right))
    if backwards:
        left_over.reverse()
    done: frozenset[str] = frozenset()
    steps = []
    while left_over:
        step = next(_possible(left, right, done, left_over))
        steps.append(step)
        done |= {one.field for one in step.fields}
        left_over = [one for one in left_over if one not in step.fields]
    return steps


def _possible(
    left: ExecutionSpec, right: ExecutionSpec, done: frozenset[str], left_over: Sequence[FieldDifference]
) -> Iterator[Step]:
    """The smallest sets of fields that can change next, in order. All of them together always can."""
    for size in range(1, len(left_over) + 1):
        for fields in combinations(left_over, size):
            spec = with_fields(left, right, done | {one.field for one in fields})
            if spec is not None:
                yield Step(fields, spec)


def attribution(
    engines: Engines,
    use: Callable[[ExecutionSpec], None],
    corpus: Corpus,
    temperature: float,
    left: ExecutionSpec,
    right: ExecutionSpec,
    progress: Callable[[int], None],
) -> Piece:
    """The right engine from the left one's spec to its own, along both paths; the left engine stays under its own.

    use: puts the right engine under a spec. Returns the steps, and a column of log-probabilities for each spec tried.
    """
    steps: list[dict[str, Any]] = []
    columns: dict[str, np.ndarray] = {"prompt": corpus.clusters()}
    seen: dict[str, str] = {}  # fingerprint -> column
    backends: dict[str, str] = {}  # column -> what computes the right engine's experts
    use(left)
    backends["right_0"] = engines[1].report().backend
    start = both(engines, "score", corpus, temperature)
    columns["left_logp"] = flat(start[0])

    def measured(spec: ExecutionSpec) -> str:
        if spec.fingerprint not in seen:
            use(spec)
            seen[spec.fingerprint] = f"right_{len(seen)}"
            columns[seen[spec.fingerprint]] = flat(engines[1].score(corpus, temperature))
            backends[seen[spec.fingerprint]] = engines[1].report().backend
        return seen[spec.fingerprint]

    seen[left.fingerprint] = "right_0"
    columns["right_0"] = flat(start[1])
    for direction in ("forwards", "backwards"):
        column = "right_0"
        for step in path(left, right, direction == "backwards"):
            if any(changes_values(one.field) for one in step.fields):
                column = measured(step.spec)
            fields = [one._asdict() for one in step.fields]
            steps.append({"direction": direction, "fields": fields, "column": column})
            progress(len(steps))
    found = {"left": left.name, "right": right.name, "start": "right_0", "steps": steps, "backends": backends}
    return found, columns


def depths(layers: int, count: int) -> list[int]:
    """At most `count` layers, evenly spaced, the first and the last among them."""
    if count == 1:
        return [0]
    return sorted({round(place) for place in np.linspace(0, layers - 1, min(count, layers))})


def logp_gap(table: Mapping[str, np.ndarray], right: str = "right_logp") -> np.ndarray:
    """float64 [tokens]: log p(left) - log p(right)."""
    return table["left_logp"] - table[right]

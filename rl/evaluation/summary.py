"""Samples -> the metrics of a benchmark, with intervals over problems.

avg: mean over problems of the share of right samples (avg@k, with k the samples of a problem). pass@k: whether one of
k samples is right. IFEval: prompt_strict and prompt_loose, the share of prompts of which all instructions are
followed; instruction_strict and instruction_loose, the share of instructions. A sample that could not be judged does
not count, in none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rl.evaluation.estimators import (
    CONFIDENCE,
    RESAMPLES,
    Estimate,
    paired_difference,
    pass_at_k,
    ratio_estimate,
)
from rl.evaluation.samples import Sample

Column = tuple[list[float], list[float]]  # numerator and denominator of a metric, one each a problem


@dataclass(frozen=True)
class Summary:
    """The metrics of one benchmark under one spec.

    errors: samples that could not be judged. truncated: share of the responses cut off at the token limit.
    length_mean: tokens. columns: metric -> its parts, by problem.
    """

    problems: int
    samples: int
    metrics: dict[str, Estimate]
    errors: int
    truncated: float
    length_mean: float
    columns: dict[str, Column]


@dataclass(frozen=True)
class Bootstrap:
    """Of the intervals: how many resamples, at which confidence, from which seed."""

    resamples: int = RESAMPLES
    confidence: float = CONFIDENCE
    seed: int = 0


def summarise(samples: Sequence[Sample], bootstrap: Bootstrap) -> Summary:
    """The metrics of the samples, which come problem by problem. Metrics without any judged sample are missing."""
    groups = [list(own) for _, own in groupby(samples, key=lambda sample: sample.position)]
    columns = _columns(groups)
    return Summary(
        problems=len(groups),
        samples=max(map(len, groups)),
        metrics={
            name: ratio_estimate(*column, **vars(bootstrap))
            for name, column in columns.items()
            if any(column[1])
        },
        errors=sum(sample.error is not None for sample in samples),
        truncated=sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        length_mean=sum(sample.tokens for sample in samples) / len(samples),
        columns=columns,
    )


def differences(first: Summary, second: Summary, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Every metric under `first` minus that under `second`, over the same problems."""
    return {
        name: paired_difference(first.columns[name], second.columns[name], **vars(bootstrap))
        for name in first.metrics.keys() & second.metrics.keys()
        if _shared(first.columns[name], second.columns[name])
    }


def pass_ks(samples: int) -> list[int]:
    """The k of pass@k that are reported: powers of two and the number of samples; pass@1 is avg."""
    powers = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [*powers, samples] if samples > 1 else []


def _columns(groups: Sequence[Sequence[Sample]]) -> dict[str, Column]:
    judged = [[sample for sample in own if sample.error is None] for own in groups]
    if any("instructions" in sample.details for own in judged for sample in own):
        return _instruction_columns(judged)
    ks = pass_ks(max(map(len, groups)))
    return {
        "avg": _by_problem(judged, 1, lambda own: sum(sample.correct for sample in own) / len(own)),
        **{f"pass@{k}": _by_problem(judged, k, _pass_at(k)) for k in ks},
    }


def _instruction_columns(judged: Sequence[Sequence[Sample]]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for kind in ("strict", "loose"):
        followed = [[sample.details[kind] for sample in own] for own in judged]
        asked = [own[0].details["instructions"] if own else 0.0 for own in judged]
        columns[f"prompt_{kind}"] = (
            [_mean([count == all_ for count in own]) for own, all_ in zip(followed, asked, strict=True)],
            [float(all_ > 0) for all_ in asked],
        )
        columns[f"instruction_{kind}"] = [_mean(own) for own in followed], asked
    return columns


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _by_problem(
    judged: Sequence[Sequence[Sample]], needed: int, value: Callable[[Sequence[Sample]], float]
) -> Column:
    """`value` of each problem that has `needed` judged samples."""
    counted = [len(own) >= needed for own in judged]
    values = [value(own) if counts else 0.0 for own, counts in zip(judged, counted, strict=True)]
    return values, [float(counts) for counts in counted]


def _pass_at(k: int) -> Callable[[Sequence[Sample]], float]:
    return lambda own: pass_at_k(len(own), sum(sample.correct for sample in own), k)


def _shared(left: Column, right: Column) -> bool:
    return any(a > 0 and b > 0 for a, b in zip(left[1], right[1], strict=True))

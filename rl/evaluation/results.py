"""The result file of an evaluation, results.json, and the same numbers as metrics for W&B.

{"format", "complete", "checkpoint": {"title", "path", "step", "fingerprint"},
 "software": {"versions", "git", "machine"}, "bootstrap": {"resamples", "confidence", "seed"}, "seed",
 "specs": {label: {"fingerprint", "layers": {name: count}}},
 "benchmarks": {name: {"data", "protocol", "template_hash", "stop_token_ids"}},
 "results": [{"benchmark", "spec", "samples_file", "problems", "samples",
              "metrics": {name: {"value", "low", "high"}}, "errors", "truncated", "length_mean"}],
 "differences": [{"benchmark", "first", "second", "metrics"}]}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.precision_map import PrecisionMap
from rl.evaluation.candidate import Candidate
from rl.evaluation.estimators import Estimate
from rl.evaluation.exams import Exam
from rl.evaluation.summary import Bootstrap, Summary, differences
from rl.records.provenance import launch
from rl.run_folder import write_atomically

FORMAT = 1
NAME = "results.json"


@dataclass(frozen=True)
class Result:
    """One benchmark under one spec. samples_file: relative to the result file."""

    exam: Exam
    spec: str
    summary: Summary
    samples_file: str

    @property
    def score(self) -> Estimate | None:
        """The metric that stands for the benchmark; None when no response could be judged."""
        return self.summary.metrics.get(self.exam.benchmark.metric)


@dataclass(frozen=True)
class Difference:
    """The metrics of a benchmark under the spec `first` minus those under `second`, problem by problem."""

    exam: Exam
    first: str
    second: str
    metrics: dict[str, Estimate]

    @property
    def score(self) -> Estimate | None:
        return self.metrics.get(self.exam.benchmark.metric)


def in_order(results: Sequence[Result]) -> list[Result]:
    """The results of a benchmark together, in the order in which benchmarks and specs first come."""
    names = list(dict.fromkeys(result.exam.name for result in results))
    return sorted(results, key=lambda result: names.index(result.exam.name))


def compare(results: Sequence[Result], bootstrap: Bootstrap) -> list[Difference]:
    """Of each benchmark, the first spec's result against those of every other."""
    first: dict[str, Result] = {}
    found = []
    for result in results:
        other = first.setdefault(result.exam.name, result)
        if other is not result:
            metrics = differences(other.summary, result.summary, bootstrap)
            found.append(Difference(result.exam, other.spec, result.spec, metrics))
    return found


def write_results(
    folder: Path,
    candidate: Candidate,
    exams: Sequence[Exam],
    maps: dict[str, PrecisionMap],
    results: Sequence[Result],
    bootstrap: Bootstrap,
    seed: int,
) -> Path:
    """Replace the result file by one with these results; complete when every exam has one under every spec."""
    process = launch()
    described = {
        "format": FORMAT,
        "complete": len(results) == len(exams) * len(maps),
        "checkpoint": {
            "title": candidate.title,
            "path": str(candidate.origin),
            "step": candidate.step,
            "fingerprint": candidate.fingerprint,
        },
        "software": {key: process[key] for key in ("versions", "git", "machine")},
        "bootstrap": asdict(bootstrap),
        "seed": seed,
        "specs": {label: _spec(precision_map) for label, precision_map in maps.items()},
        "benchmarks": {exam.name: _benchmark(exam) for exam in exams},
        "results": [_result(result) for result in results],
        "differences": [
            {
                "benchmark": difference.exam.name,
                "first": difference.first,
                "second": difference.second,
                "metrics": _metrics(difference.metrics),
            }
            for difference in compare(results, bootstrap)
        ],
    }
    path = folder / NAME
    write_atomically(path, json.dumps(described, indent=1, allow_nan=False) + "\n")
    return path


def metrics_of(result: Result) -> dict[str, float]:
    """The result by the names of `rl.metrics`."""
    summary = result.summary
    values = {
        "error_rate": summary.errors / (summary.problems * summary.samples),
        "truncated": summary.truncated,
        "length_mean": summary.length_mean,
        **_named("score", result.score),
    }
    return {f"benchmark/{result.exam.name}/{result.spec}/{name}": value for name, value in values.items()}


def metrics_of_difference(difference: Difference) -> dict[str, float]:
    """The difference by the names of `rl.metrics`; it stands with the second spec."""
    return {
        f"benchmark/{difference.exam.name}/{difference.second}/{name}": value
        for name, value in _named("difference", difference.score).items()
    }


def _named(name: str, estimate: Estimate | None) -> dict[str, float]:
    if estimate is None:
        return {}
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _spec(precision_map: PrecisionMap) -> dict[str, Any]:
    layers = Counter(spec.name for spec in precision_map.layers)
    return {"fingerprint": precision_map.fingerprint, "layers": dict(layers)}


def _benchmark(exam: Exam) -> dict[str, Any]:
    return {
        "data": exam.data,
        "protocol": {"reward": exam.benchmark.reward, **asdict(exam.protocol)},
        "template_hash": exam.template_hash,
        "stop_token_ids": list(exam.stop_token_ids),
    }


def _result(result: Result) -> dict[str, Any]:
    summary = result.summary
    return {
        "benchmark": result.exam.name,
        "spec": result.spec,
        "samples_file": result.samples_file,
        "problems": summary.problems,
        "samples": summary.samples,
        "metrics": _metrics(summary.metrics),
        "errors": summary.errors,
        "truncated": summary.truncated,
        "length_mean": summary.length_mean,
    }


def _metrics(metrics: dict[str, Estimate]) -> dict[str, dict[str, float]]:
    return {name: asdict(estimate) for name, estimate in sorted(metrics.items())}

"""Benchmarks in the midst of a run, answered by the sampler that the run has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl.config import Config
from rl.config.scoring import EvaluationConfig
from rl.errors import ConfigError
from rl.evaluation.benchmarks import BENCHMARKS, TRAINED, EvaluationProtocol
from rl.evaluation.config import check_protocol
from rl.evaluation.exams import Exam, make_exam, read_problems
from rl.evaluation.results import Result, metrics_of
from rl.evaluation.runner import Generate, pool_for, run_exam
from rl.evaluation.summary import Bootstrap, summarise


def training_exams(config: Config, tokenizer: Any) -> tuple[Exam, ...]:
    """The benchmarks that `evaluation.benchmarks` names. Raises UserError for what cannot work."""
    settings = config.evaluation
    return tuple(
        make_exam(
            name,
            _protocol(name, settings.protocol.get(name, {})),
            tokenizer,
            config.sampler.max_model_len,
            data_dir=settings.data_dir,
            problems=settings.problems,
            key="evaluation.protocol",
        )
        for name in settings.benchmarks
    )


def benchmark_texts(settings: EvaluationConfig) -> dict[str, list[str]]:
    """Benchmark -> the problems that `settings` asks of it, bare of any template: training must not show them.

    Raises DataError for data that cannot be read.
    """
    return {
        name: [str(problem.prompt) for problem in read_problems(BENCHMARKS[name], settings.data_dir)[0]]
        for name in settings.benchmarks
    }


def benchmark_metrics(
    exams: Sequence[Exam], generate: Generate, *, seed: int, workers: int, timeout_s: float
) -> dict[str, float]:
    """The results of the exams, always with the same draws, by the names of `rl.metrics`."""
    metrics: dict[str, float] = {}
    for exam in exams:
        with pool_for(exam, workers, timeout_s) as pool:
            total = len(exam.prompts) * exam.protocol.samples
            samples = run_exam(exam, generate, pool.score, seed=seed, part=total)
        metrics |= metrics_of(Result(exam, TRAINED, summarise(samples, Bootstrap(seed=seed)), ""))
    return metrics


def _protocol(name: str, changes: dict[str, Any]) -> EvaluationProtocol:
    key = f"evaluation.protocol.{name}"
    try:
        protocol = replace(BENCHMARKS[name].protocol, **changes)
        check_protocol(key, protocol)
    except TypeError as error:
        raise ConfigError(f"{key}: {error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return protocol

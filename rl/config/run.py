"""One launch: its name, length and folders, and what it shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl.config.rules import require


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
        require(
            self.name not in ("", ".", "..") and "/" not in self.name, "run.name", self.name, "a folder name"
        )
        require(0 <= self.seed < 2**32, "run.seed", self.seed, "in [0, 2**32)")
        require(self.iterations >= 1, "run.iterations", self.iterations, "at least 1")
        require(self.checkpoint_every >= 1, "run.checkpoint_every", self.checkpoint_every, "at least 1")
        require(self.keep_checkpoints >= 1, "run.keep_checkpoints", self.keep_checkpoints, "at least 1")
        require(self.samplers >= 1, "run.samplers", self.samplers, "at least 1")
        require(self.object_store_mib >= 80, "run.object_store_mib", self.object_store_mib, "at least 80")


@dataclass(frozen=True)
class LoggingConfig:
    """W&B (`offline` writes into the run folder and sends nothing) and the terminal view."""

    wandb: Literal["off", "offline", "online"] = "offline"
    project: str = "minite"
    view: Literal["auto", "live", "plain"] = "auto"

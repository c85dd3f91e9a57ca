"""The configuration of a run: frozen dataclasses, one a Hydra group. Defaults are written here and nowhere else.

Rules about one section stand in its ``__post_init__``; rules across sections, and those that need the model or the
data, stand in `rl.validate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import ConfigDict

from learner.config import LearnerConfig
from rl.config.algorithm import AlgorithmConfig
from rl.config.cluster import ClusterConfig, SyncConfig
from rl.config.data import DataConfig
from rl.config.model import ModelConfig, SpecConfig
from rl.config.run import LoggingConfig, RunConfig
from rl.config.scoring import EvaluationConfig, RewardConfig
from sampler.config import SamplerConfig


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

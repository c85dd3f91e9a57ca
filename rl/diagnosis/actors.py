"""An engine under diagnosis in a process of its own: a thin actor over `rl.diagnosis.engine.Engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from learner.config import LearnerConfig
from rl.actors import Actor
from sampler.config import SamplerConfig, SamplingConfig

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rl.diagnosis.corpus import Corpus
    from rl.diagnosis.engine import Engine, Given, Imposed, Trace


def open_engine(
    kind: str,
    side: int,
    folder: Path,
    precision_map: PrecisionMap | None,
    learner: LearnerConfig,
    sampler: SamplerConfig,
) -> Engine:
    """kind: of `rl.diagnosis.config.ENGINES`. hf takes type and threads from the settings of the learner on the left
    side (0), from those of the sampler on the right one. precision_map: None for a dense model.
    """
    match kind:
        case "megatron":
            assert precision_map is not None
            from rl.diagnosis.megatron import MegatronEngine

            return MegatronEngine(folder, precision_map, learner)
        case "vllm":
            from rl.diagnosis.vllm import VllmEngine

            # It changes its spec and is listened to, which a captured step is not; and no learner wants its memory.
            return VllmEngine(folder, precision_map, replace(sampler, sleep="off", cuda_graph_sizes=()))
        case _:
            from rl.diagnosis.hf import HfEngine

            own = sampler if side else learner
            return HfEngine(folder, precision_map, own.dtype, own.threads)


class EngineActor(Actor):
    """The methods of an engine behind Ray."""

    def __init__(self, kind: str, *arguments: Any):
        """As `open_engine`."""
        super().__init__()
        self.engine: Any = open_engine(kind, *arguments)

    def kind(self) -> str:
        return self.engine.kind

    def use(self, precision_map: PrecisionMap) -> None:
        self.engine.use(precision_map)

    def report(self) -> EngineReport:
        return self.engine.report()

    def generate(
        self, prompts: list[list[int]], seeds: list[list[int]], sampling: SamplingConfig
    ) -> list[list[Any]]:
        return self.engine.generate(prompts, seeds, sampling)

    def score(self, corpus: Corpus, temperature: float) -> list[np.ndarray]:
        return self.engine.score(corpus, temperature)

    def imposed(
        self,
        corpus: Corpus,
        temperature: float,
        layers: Sequence[int],
        routes: Mapping[int, np.ndarray] | None,
        chosen: Sequence[np.ndarray],
    ) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
        """Log-probabilities and routes; the layers are kept for `take_imposed`, which gives them one by one."""
        logp, own, self.layers = self.engine.imposed(corpus, temperature, layers, routes, chosen)
        return logp, own

    def take_imposed(self, layer: int) -> Imposed:
        return self.layers.pop(layer)

    def inputs(
        self, corpus: Corpus, temperature: float, layers: Sequence[int]
    ) -> tuple[list[np.ndarray], dict[int, list[Given]]]:
        return self.engine.inputs(corpus, temperature, layers)

    def score_with(
        self, corpus: Corpus, temperature: float, layer: int, outputs: Sequence[torch.Tensor]
    ) -> list[np.ndarray]:
        # What comes through Ray cannot be written to.
        return self.engine.score_with(corpus, temperature, layer, [output.clone() for output in outputs])

    def run_layer(self, layer: int, given: Given) -> torch.Tensor:
        return self.engine.run_layer(layer, given).detach().cpu()

    def trace(self, layer: int, given: Given) -> Trace:
        return self.engine.trace(layer, given)

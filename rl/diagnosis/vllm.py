"""The sampler's engine, vLLM, under diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.experts import ExpertWeights
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from kernels.spec import ExecutionSpec
from rl.diagnosis.corpus import Corpus
from rl.diagnosis.engine import Call, Engine, Given, Tap
from rl.diagnosis.masters import Masters
from rl.models import model_architecture
from sampler.config import SamplerConfig, SamplingConfig
from sampler.engine import Completion, Sampler


class VllmEngine(Engine):
    kind = "vllm"

    def __init__(self, folder: Path, precision_map: PrecisionMap | None, config: SamplerConfig):
        self.sampler = Sampler(folder, precision_map, config)
        if precision_map is None:
            self.layers = self.experts = 0
            return
        self.masters = Masters(folder, config.dtype, config.device)
        architecture = model_architecture(folder)
        self.layers, self.experts = architecture.layers, architecture.experts
        self.renormalize = architecture.renormalize_router

    def use(self, precision_map: PrecisionMap) -> None:
        self.sampler.compute_under(precision_map, self.masters)

    def report(self) -> EngineReport:
        return self.sampler.report()

    def generate(
        self, prompts: list[list[int]], seeds: list[list[int]], sampling: SamplingConfig
    ) -> list[list[Completion]]:
        return self.sampler.generate(prompts, seeds, sampling)

    def score(self, corpus: Corpus, temperature: float) -> list[np.ndarray]:
        logp = self.sampler.score(corpus.sequences, corpus.prompt_lengths, temperature)
        return [np.array(own, np.float32) for own in logp]

    @contextmanager
    def tapped(self, taps: Mapping[int, Tap]) -> Iterator[None]:
        def seen(layer: int) -> Callable[..., torch.Tensor | None]:
            def see(rows: Any, *tensors: torch.Tensor) -> torch.Tensor | None:
                x, ids, coefficients, output = tensors
                return taps[layer](
                    Call(layer, rows.sequences, rows.positions, x, ids.long(), coefficients, output)
                )

            return see

        with self.sampler.tapped({layer: seen(layer) for layer in taps}):
            yield

    def run_layer(self, layer: int, given: Given) -> torch.Tensor:
        method = self.sampler.experts[layer]
        stored = next(iter(self.held(layer)[0].tensors().values()))
        x, ids, coefficients = (part.to(stored.device) for part in (given.x, given.ids, given.coefficients))
        output = method.compute(x, ids, coefficients)
        method.guard.check()
        return output

    def router_weight(self, layer: int) -> torch.Tensor:
        return self.sampler.router_weight(layer)

    def spec(self, layer: int) -> ExecutionSpec:
        return self.sampler.experts[layer].spec

    def derived_anew(self, layer: int) -> Mapping[str, torch.Tensor]:
        weights = self.held(layer)[0]
        return self.kernels(layer).prepare(weights, self.spec(layer), compact=True).derived()

    def held(self, layer: int) -> tuple[ExpertWeights, Mapping[str, torch.Tensor]]:
        method = self.sampler.experts[layer]
        assert method.weights is not None
        return method.weights, method.prepared().derived()

"""The learner's engine, Megatron-core, under diagnosis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.experts import ExpertWeights
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from kernels.spec import ExecutionSpec
from learner.batch import cut
from learner.config import LearnerConfig
from learner.packing import Packing
from learner.policy import Policy
from rl.diagnosis.corpus import Corpus
from rl.diagnosis.engine import Call, Engine, Given, Tap


class MegatronEngine(Engine):
    kind = "megatron"

    def __init__(self, folder: Path, precision_map: PrecisionMap, config: LearnerConfig):
        self.policy = Policy(folder, precision_map, config, seed=0)
        architecture = self.policy.architecture
        self.layers, self.experts = architecture.layers, architecture.experts
        self.renormalize = architecture.renormalize_router
        self._batches: list[np.ndarray] = []  # rows of the micro-batches of the pass under way
        self._lengths = torch.empty(0, dtype=torch.int64)

    def use(self, precision_map: PrecisionMap) -> None:
        self.policy.model.compute_under(precision_map)
        self.policy.precision_map = precision_map

    def report(self) -> EngineReport:
        report = self.policy.report()
        specs = tuple(experts.execution_spec for experts in self.policy.model.experts())
        return EngineReport(
            report.engine, PrecisionMap(specs), report.backend, report.expert_layers, report.expert_calls
        )

    def score(self, corpus: Corpus, temperature: float) -> list[np.ndarray]:
        lengths = torch.tensor([len(sequence) for sequence in corpus.sequences])
        tokens = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        for row, (sequence, prompt) in enumerate(zip(corpus.sequences, corpus.prompt_lengths, strict=True)):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, prompt : len(sequence)] = True
        self._lengths = lengths
        self._batches = [rows.numpy() for rows in cut(lengths, self.policy.config.micro_batch_tokens)]
        logp = self.policy.score(tokens, lengths, mask, temperature).logp
        return [own[chosen].numpy() for own, chosen in zip(logp, mask, strict=True)]

    @contextmanager
    def tapped(self, taps: Mapping[int, Tap]) -> Iterator[None]:
        inside = False
        calls = dict.fromkeys(taps, 0)

        def hook(layer: int) -> Any:
            def see(_: Any, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, None]) -> Any:
                nonlocal inside
                if inside:
                    return None
                rows = self._batches[calls[layer]]
                calls[layer] += 1
                packing = Packing.of(self._lengths[rows])
                sequences, positions = rows[packing.sequences.numpy()], packing.positions.numpy()
                inside = True
                try:
                    x, ids, coefficients = args
                    call = Call(layer, sequences, positions, x, ids, coefficients, output[0])
                    replaced = taps[layer](call)
                finally:
                    inside = False
                return None if replaced is None else (replaced, None)

            return see

        experts = self.policy.model.experts()
        hooks = [experts[layer].register_forward_hook(hook(layer)) for layer in taps]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def run_layer(self, layer: int, given: Given) -> torch.Tensor:
        experts = self.policy.model.experts()[layer]
        device = experts.weight1.device
        x = given.x.to(device, experts.weight1.dtype)
        with torch.no_grad():
            output, _ = experts(x, given.ids.to(device), given.coefficients.to(device))
        experts.guard.check()
        return output

    def router_weight(self, layer: int) -> torch.Tensor:
        return self.policy.model.decoder.layers[layer].mlp.router.weight.detach()

    def spec(self, layer: int) -> ExecutionSpec:
        return self.policy.model.experts()[layer].execution_spec

    def held(self, layer: int) -> tuple[ExpertWeights, Mapping[str, torch.Tensor]]:
        experts = self.policy.model.experts()[layer]
        weights = experts.quantized(experts.execution_spec)
        return weights, experts.derived(experts.execution_spec, weights.layout)

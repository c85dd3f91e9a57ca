"""transformers as a third opinion: its attention, norms and router, with the experts under a spec by `kernels`.

A dense model runs as transformers has it: then no layer has experts, and only log-probabilities can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kernels import backends
from kernels.experts import ExpertWeights
from kernels.guard import NonFiniteGuard
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport, names
from kernels.routing import sort_slots
from kernels.spec import ExecutionSpec
from rl.diagnosis.corpus import Corpus
from rl.diagnosis.engine import Call, Engine, Given, Tap


class HfEngine(Engine):
    """dtype: of weights and activations outside the experts; logits are FP32. threads: of torch; 0: its own choice."""

    kind = "hf"

    def __init__(self, folder: Path, precision_map: PrecisionMap | None, dtype: str, threads: int = 0):
        if threads:
            torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        blocks = [_block(layer) for layer in self.model.model.layers]
        self.blocks = [block for block in blocks if block is not None]
        self.layers = len(self.blocks)
        self.experts, self.renormalize = 0, True
        self._row: tuple[int, int] = 0, 0  # the sequence under way, and its length
        if precision_map is not None:
            self.experts = self.blocks[0].gate.weight.shape[0]
            self.renormalize = bool(getattr(self.model.config, "norm_topk_prob", True))
            for index, block in enumerate(self.blocks):
                own = block.experts
                masters = own.gate_up_proj.detach(), own.down_proj.detach()
                block.experts = SpecifiedExperts(*masters, precision_map.spec_for(index), index)

    def use(self, precision_map: PrecisionMap) -> None:
        for index, block in enumerate(self.blocks):
            block.experts.compute_under(precision_map.spec_for(index))

    def report(self) -> EngineReport:
        layers = [block.experts for block in self.blocks]
        return EngineReport(
            "transformers",
            PrecisionMap(tuple(layer.spec for layer in layers)),
            names(layer.kernels.name for layer in layers),
            len(layers),
            sum(layer.calls for layer in layers),
        )

    @torch.no_grad()
    def score(self, corpus: Corpus, temperature: float) -> list[np.ndarray]:
        head = self.model.get_output_embeddings().weight.float()
        logp = []
        for index, (sequence, prompt) in enumerate(zip(corpus.sequences, corpus.prompt_lengths, strict=True)):
            self._row = index, len(sequence)
            hidden = self.model.model(torch.tensor([sequence]), use_cache=False).last_hidden_state[0]
            logits = hidden[prompt - 1 : -1].float() @ head.T / temperature
            targets = torch.tensor(sequence[prompt:])[:, None]
            logp.append(logits.log_softmax(-1).gather(1, targets)[:, 0].numpy())
        for block in self.blocks:
            block.experts.guard.check()
        return logp

    @contextmanager
    def tapped(self, taps: Mapping[int, Tap]) -> Iterator[None]:
        def seen(layer: int) -> Any:
            def see(x: torch.Tensor, ids: torch.Tensor, p: torch.Tensor, output: torch.Tensor) -> Any:
                sequence, length = self._row
                return taps[layer](
                    Call(layer, np.full(length, sequence), np.arange(length), x, ids, p, output)
                )

            return see

        for layer in taps:
            self.blocks[layer].experts.tap = seen(layer)
        try:
            yield
        finally:
            for layer in taps:
                self.blocks[layer].experts.tap = None

    def run_layer(self, layer: int, given: Given) -> torch.Tensor:
        return self.blocks[layer].experts.compute(given.x, given.ids, given.coefficients)

    def router_weight(self, layer: int) -> torch.Tensor:
        return self.blocks[layer].gate.weight.detach()

    def spec(self, layer: int) -> ExecutionSpec:
        return self.blocks[layer].experts.spec

    def held(self, layer: int) -> tuple[ExpertWeights, Mapping[str, torch.Tensor]]:
        experts = self.blocks[layer].experts
        return experts.weights, experts.prepared.derived()


class SpecifiedExperts(nn.Module):
    """In place of transformers' experts of one layer: the same masters under a spec.

    tap: sees input, sorted experts, coefficients and output of every call, and may replace the output.
    """

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor, spec: ExecutionSpec, layer: int):
        super().__init__()
        self.masters = w13, w2
        self.guard = NonFiniteGuard(layer, len(w13))
        self.calls = 0
        self.tap: Any = None
        self.compute_under(spec)

    def compute_under(self, spec: ExecutionSpec) -> None:
        self.spec = spec
        self.kernels = backends.choose(spec, self.masters[0].device)
        self.weights = self.kernels.quantize(*self.masters, spec)
        self.prepared = self.kernels.prepare(self.weights, spec)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        ids, coefficients = sort_slots(ids, coefficients.float())
        output = self.compute(x, ids, coefficients)
        replaced = None if self.tap is None else self.tap(x, ids, coefficients, output)
        return output if replaced is None else replaced

    def compute(self, x: torch.Tensor, ids: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        """[R, H] of slots that are sorted."""
        x = x.to(self.masters[0].dtype)
        return self.kernels.forward(x, ids, coefficients, self.prepared, self.spec, self.guard).to(x.dtype)


def _block(layer: nn.Module) -> Any:
    """The part of a decoder layer that has a gate and experts; None in a dense one."""
    for module in layer.modules():
        if hasattr(module, "gate") and hasattr(module, "experts"):
            return module
    return None

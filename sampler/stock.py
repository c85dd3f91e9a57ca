"""vLLM as it is, for engines that cannot change: its own loader, expert layers and quantisation; weights come as BF16.

Nothing of this package computes here. What the engine does is written down as `own_spec`; nobody claims that it is
the learner's, and the gap between the two is measured like any other. The engine repacks what it loads, so what it
holds cannot be compared with what was sent: `StockWeights` keeps a copy in the form that travels, which is attested,
and hands all of it to the engine's own reload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from kernels.catalogue import named_spec
from kernels.experts import StoredLayout, split_wire_name, wire_name
from kernels.precision_map import PrecisionMap
from kernels.shard import NO_SHARDS
from kernels.spec import ExecutionSpec

_EXPERT = re.compile(r"(model\.layers\.(\d+)\.\w+)\.experts\.(\d+)\.(\w+)\.weight")
_MATRICES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def own_spec(dtype: str) -> ExecutionSpec:
    """What vLLM's unquantised expert layers do in `dtype`: products of that type, summed in FP32 in their own order."""
    return named_spec({"bfloat16": "bf16", "float32": "fp32"}[dtype], {"accumulation": "fp32_gemm"})


def own_map(layers: int, dtype: str) -> PrecisionMap:
    return PrecisionMap.resolve(layers, own_spec(dtype))


class StockWeights:
    """An `rl.sync.receiver.Holder` around an engine's reload.

    worker: vLLM's. model_dir: what the engine has loaded. version, closed: as in `sampler.weights.LiveWeights`.
    """

    def __init__(self, worker: Any, model_dir: Path, precision_map: PrecisionMap, dtype: torch.dtype) -> None:
        self.precision_map = precision_map
        self.version = 0
        self.closed: str | None = None
        self.layout = StoredLayout.ROWS
        self.shards = NO_SHARDS
        self._worker = worker
        self._names: dict[tuple[int, int, str], str] = {}  # layer, expert, matrix -> name on disk
        self._copy = self._read(model_dir, dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copy, by names on the wire: experts stacked, `w13.weight` [E, 2F, H] and `w2.weight` [E, H, F]."""
        return self._copy

    def refresh(self) -> dict[str, torch.Tensor]:
        """Hand the copy to the engine. What that makes of it is its own: nothing derived is given back."""
        if self._worker.device.type == "cpu":
            for module in self._worker.get_model().modules():
                method = getattr(module, "quant_method", None)
                if hasattr(method, "moe_kernel"):
                    # vLLM's CPU build packs experts only when it makes their kernel, and on a reload has one already:
                    # it would take unpacked weights for packed ones.
                    method.moe_kernel = None
        self._worker.reload_weights(weights_iterator=self._on_disk())
        return {}

    def _on_disk(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, by their names in a checkpoint."""
        for name, tensor in self._copy.items():
            if split_wire_name(name) is None:
                yield name, tensor
        for (layer, expert, matrix), name in self._names.items():
            if matrix == "down":
                yield name, self._copy[wire_name(layer, "w2.weight")][expert]
            else:
                gate, up = self._copy[wire_name(layer, "w13.weight")][expert].chunk(2)
                yield name, gate if matrix == "gate" else up

    def _read(self, folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The checkpoint in the form that travels. Experts come last, layer by layer."""
        outside: dict[str, torch.Tensor] = {}
        experts: dict[tuple[int, int, str], torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 - it is no mapping
                    match = _EXPERT.fullmatch(name)
                    if match is None:
                        outside[name] = content.get_tensor(name).to(dtype)
                    else:
                        key = int(match[2]), int(match[3]), _MATRICES[match[4]]
                        experts[key], self._names[key] = content.get_tensor(name).to(dtype), name
        self._names = dict(sorted(self._names.items()))
        return outside | _stacked(experts)


def _stacked(experts: dict[tuple[int, int, str], torch.Tensor]) -> dict[str, torch.Tensor]:
    wire = {}
    for layer in sorted({layer for layer, _, _ in experts}):
        numbers = sorted({expert for own, expert, _ in experts if own == layer})
        w13 = [torch.cat((experts[layer, e, "gate"], experts[layer, e, "up"])) for e in numbers]
        wire[wire_name(layer, "w13.weight")] = torch.stack(w13)
        wire[wire_name(layer, "w2.weight")] = torch.stack([experts[layer, e, "down"] for e in numbers])
    return wire


class StockExperts:
    """Counts the calls of the engine's expert layers."""

    def __init__(self, model: nn.Module) -> None:
        from vllm.model_executor.layers.fused_moe import RoutedExperts

        self.calls = 0
        owners = [
            module
            for module in model.modules()
            if any(isinstance(child, RoutedExperts) for child in module.children())
        ]
        self.layers = len(owners)
        for owner in owners:
            owner.register_forward_hook(self._called)

    def _called(self, *_: Any) -> None:
        self.calls += 1

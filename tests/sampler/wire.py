"""What a learner would send, made from a checkpoint on disk with `kernels` alone."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from kernels.experts import ExpertWeights, wire_name
from kernels.precision_map import PrecisionMap

_NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")


def expert_masters(state: dict[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E, 2F, H] and w2 [E, H, F] of one layer of a Qwen3-MoE or Mixtral checkpoint."""
    parts: dict[tuple[int, str], torch.Tensor] = {}
    for name, tensor in state.items():
        match = _EXPERT.fullmatch(name)
        if match and int(match[1]) == layer:
            parts[int(match[2]), _NAMES[match[3]]] = tensor
    experts = sorted({expert for expert, _ in parts})
    w13 = torch.stack([torch.cat((parts[e, "gate"], parts[e, "up"])) for e in experts])
    return w13, torch.stack([parts[e, "down"] for e in experts])


def wire_tensors(folder: Path, precision_map: PrecisionMap) -> dict[str, torch.Tensor]:
    """Every tensor that travels, by name."""
    state = load_file(folder / "model.safetensors")
    sent = {name: tensor for name, tensor in state.items() if not _EXPERT.fullmatch(name)}
    for layer, spec in enumerate(precision_map.layers):
        weights = ExpertWeights.quantize(*expert_masters(state, layer), spec)
        sent |= {wire_name(layer, part): tensor for part, tensor in weights.tensors().items()}
    return sent

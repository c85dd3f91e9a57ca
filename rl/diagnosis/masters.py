"""The master weights of a model folder's experts, one layer at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from learner.families.registry import family_of
from learner.folders import read_config
from learner.mapping import is_expert, rules


class Masters:
    """dtype, device: of the weights as the engines hold them. On a GPU they are read once, and stay there."""

    def __init__(self, folder: Path, dtype: str, device: str = "cpu"):
        config = read_config(folder)
        family = family_of(config)
        self._dtype, self._device = getattr(torch, dtype), torch.device(device)
        self._rules = {
            rule.megatron: rule for rule in rules(family, family.read(config)) if is_expert(rule.megatron)
        }
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as stored:
                self._files |= dict.fromkeys(stored.keys(), file)

    def __call__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 [E, 2F, H], gate rows first, and w2 [E, H, F]."""
        if layer not in self._kept:
            prefix = f"decoder.layers.{layer}.mlp.experts.weight"
            found = self._merged(f"{prefix}1"), self._merged(f"{prefix}2")
            if self._device.type == "cpu":
                return found
            self._kept[layer] = found
        return self._kept[layer]

    def _merged(self, name: str) -> torch.Tensor:
        rule = self._rules[name]
        tensors: dict[str, torch.Tensor] = {}
        for file in {self._files[part] for part in rule.hf}:
            with safe_open(file, framework="pt") as stored:
                tensors |= {part: stored.get_tensor(part) for part in rule.hf if self._files[part] == file}
        return rule.merge([tensors[part] for part in rule.hf]).to(self._dtype).to(self._device)

"""Learner checkpoints: everything that the next step depends on, in safetensors and JSON.

A folder holds `weights.safetensors` (Megatron names), `optimizer.safetensors`, `rng.safetensors` and
`state.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from learner.optimizer import Optimizer

FORMAT = 1


def save(folder: Path, model: nn.Module, optimizer: Optimizer, identity: Mapping[str, Any]) -> None:
    """Write a checkpoint into `folder`, which is made.

    identity: plain values that must be equal when the checkpoint is restored. Raises FileExistsError when
    `folder` exists.
    """
    folder.mkdir(parents=True)
    save_file(_weights(model), folder / "weights.safetensors")
    save_file(_plain(optimizer.state()), folder / "optimizer.safetensors")
    save_file(_rng_state(), folder / "rng.safetensors")
    state = {"format": FORMAT, "steps": optimizer.steps, "identity": dict(identity)}
    (folder / "state.json").write_text(json.dumps(state, indent=2))


def load(folder: Path, model: nn.Module, optimizer: Optimizer, identity: Mapping[str, Any]) -> None:
    """Restore what `save` wrote, bit for bit.

    Raises FileNotFoundError when `folder` is no checkpoint, and ValueError when it was written for another
    model, another precision map or another version of the format; nothing is restored then.
    """
    if not (folder / "state.json").is_file():
        raise FileNotFoundError(f"{folder} is not a learner checkpoint: it holds no state.json")
    state = json.loads((folder / "state.json").read_text())
    if state["format"] != FORMAT:
        raise ValueError(f"{folder} has checkpoint format {state['format']}, expected {FORMAT}")
    saved, present = state["identity"], json.loads(json.dumps(dict(identity)))
    differences = [
        f"{key}: checkpoint {saved.get(key)!r}, learner {present.get(key)!r}"
        for key in sorted(saved.keys() | present.keys())
        if saved.get(key) != present.get(key)
    ]
    if differences:
        raise ValueError(f"{folder} does not belong to this learner: " + "; ".join(differences))

    weights = load_file(folder / "weights.safetensors")
    own = _weights(model)
    if {n: (t.shape, t.dtype) for n, t in weights.items()} != {n: (t.shape, t.dtype) for n, t in own.items()}:
        raise ValueError(f"{folder}: the weights stored are not those of this model")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    optimizer.load_state(load_file(folder / "optimizer.safetensors"), state["steps"])
    _set_rng_state(load_file(folder / "rng.safetensors"))


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return _plain({name: parameter.detach() for name, parameter in model.named_parameters()})


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])

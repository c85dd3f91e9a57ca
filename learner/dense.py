"""Norms and projections outside the experts: Transformer Engine's on a GPU where it is installed, else torch's.

Experts run through `kernels` either way, attention through torch.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from learner.megatron_api import transformer_engine_modules
from learner.modules import RMSNorm


@dataclass(frozen=True)
class DenseModules:
    """Classes for Megatron's specs; None leaves Megatron's own local one. says: what was chosen, and why."""

    says: str
    norm: type = RMSNorm
    column_linear: type | None = None
    row_linear: type | None = None


def choose(device: torch.device, transformer_engine: bool) -> DenseModules:
    """transformer_engine: whether it may be used. Prints what was chosen."""
    if not transformer_engine:
        chosen = DenseModules("torch (learner.transformer_engine=false)")
    elif device.type != "cuda":
        chosen = DenseModules("torch (no GPU)")
    elif importlib.util.find_spec("transformer_engine") is None:
        chosen = DenseModules("torch (Transformer Engine is not installed)")
    else:
        chosen = _transformer_engine()
    print(f"learner: norms and projections outside the experts on {device}: {chosen.says}", flush=True)
    return chosen


def _transformer_engine() -> DenseModules:
    version, norm, column_linear, row_linear = transformer_engine_modules()
    return DenseModules(f"Transformer Engine {version}", norm, column_linear, row_linear)

"""Model folders with random weights, for runs that start from nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from learner.families.registry import family_of
from learner.folders import new_folder


def initialize(folder: str | Path, config: Mapping[str, Any], seed: int) -> None:
    """Write a float32 model folder, initialised by transformers' own rules for the family.

    config: `model_type`, and whatever else differs from that family's defaults in transformers. Raises
    ValueError for a model that the learner cannot hold, FileExistsError when `folder` holds something.
    """
    settings = dict(config)
    model_type = settings.pop("model_type", None)
    try:
        hf_config = AutoConfig.for_model(model_type, **settings)
    except (KeyError, ValueError):
        raise ValueError(f"transformers knows no model_type {model_type!r}") from None
    family_of(hf_config).read(hf_config)
    with new_folder(Path(folder)) as partial, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).save_pretrained(partial)

"""The model families that the learner can hold."""

from __future__ import annotations

from transformers import PretrainedConfig

from learner.families import mixtral, qwen3_moe
from learner.families.architecture import Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (qwen3_moe.FAMILY, mixtral.FAMILY)}


def family_of(config: PretrainedConfig) -> Family:
    """Raises ValueError for a model type that is none of `FAMILIES`."""
    if config.model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ValueError(f"model type {config.model_type!r} is not supported; there are: {supported}")
    return FAMILIES[config.model_type]

"""What the policy is made of, from its configuration alone: no weights are read or made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner.families.architecture import Architecture
from learner.families.registry import family_of
from rl.config import Config
from rl.config.data import ArithmeticData
from rl.data.arithmetic import ALPHABET
from rl.data.character_tokenizer import character_tokenizer
from rl.errors import ConfigError, DataError
from rl.models import model_architecture


def planned_architecture(config: Config) -> tuple[Architecture, str]:
    """Of the policy that a run with `config` starts from, and where that was read. Raises DataError when nothing says
    what it is made of, and for a model that the learner cannot hold.
    """
    model = config.model
    if model.source == "random":
        return _described({**_vocabulary(config), **model.hf_config}, model.family), "model.hf_config"
    path = Path(str(model.path))
    if model.source == "folder" and (path / "config.json").is_file():
        return model_architecture(path), str(path / "config.json")
    if model.hf_config:
        return _described(model.hf_config, model.family), "model.hf_config"
    if model.source == "folder":
        raise DataError(
            f"model.path={model.path!r}: no config.json there, and no model.hf_config says what it holds"
        )
    from learner.upcycle import upcycled_config

    try:
        found = upcycled_config(str(model.path), model.experts)
        return family_of(found).read(found), str(model.path)
    except (ValueError, FileNotFoundError) as error:
        raise DataError(f"model: {error}") from error


def _described(settings: dict[str, Any], family: str | None) -> Architecture:
    from transformers import AutoConfig

    try:
        found = AutoConfig.for_model(str(family), **settings)
        return family_of(found).read(found)
    except (KeyError, ValueError) as error:
        raise DataError(f"model.family={family!r}: {error}") from error


def _vocabulary(config: Config) -> dict[str, int]:
    """The vocabulary that the data bring."""
    if not isinstance(config.data, ArithmeticData):
        raise ConfigError("model.source=random needs data that bring their own vocabulary (data=arithmetic)")
    return {"vocab_size": len(character_tokenizer(ALPHABET))}

"""The initial policy as a Hugging Face checkpoint folder, made where needed and cached by content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from learner.families.architecture import Architecture
from learner.families.registry import family_of
from learner.folders import read_config
from rl.config.model import ModelConfig
from rl.disk import room_for
from rl.errors import ConfigError, DataError

_FORMAT = 1  # raise it when the same settings give other weights


def initial_model(config: ModelConfig, tokenizer_folder: Path | None, seed: int, cache: Path) -> Path:
    """The folder of the policy before any training.

    `tokenizer_folder` goes with a randomly initialised model, whose vocabulary it decides. Raises DataError when
    the folder or package named by `config` is missing or is not a supported model.
    """
    match config.source:
        case "folder":
            folder = Path(str(config.path))
            if not (folder / "config.json").is_file():
                raise DataError(
                    f"model.path={config.path!r}: no Hugging Face checkpoint there (config.json is missing)"
                )
            return folder
        case "random":
            if tokenizer_folder is None:
                raise DataError(
                    "model.source=random needs data that bring their own vocabulary (data=arithmetic)"
                )
            return _random_model(config, tokenizer_folder, seed, cache)
        case "upcycle":
            return _upcycled_model(config, seed, cache)


def model_architecture(folder: Path) -> Architecture:
    """What the checkpoint in `folder` is made of. Raises DataError for a model that the learner cannot hold."""
    try:
        config = read_config(folder)
        return family_of(config).read(config)
    except (ValueError, FileNotFoundError) as error:
        raise DataError(f"model: {error}") from error


def cached_folder(cache: Path, kind: str, key: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """`cache/kind-<hash of key>`, made by `make(folder)` if it is not there; appears whole or not at all. Of several
    runs that make it at the same time all take that of the first to be done.
    """
    text = json.dumps({"format": _FORMAT, **key}, sort_keys=True, default=str)
    folder = cache / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=cache))
    except OSError as error:
        raise ConfigError(
            f"run.cache_dir={cache}: a folder that can be written ({error.strerror})"
        ) from error
    try:
        with room_for(folder):
            make(scratch)
            (scratch / "cache_key.json").write_text(text)
            _appear(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _appear(scratch: Path, folder: Path) -> None:
    try:
        os.rename(scratch, folder)
    except OSError:
        if not folder.is_dir():  # made by another run meanwhile, from the same settings
            raise


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of the files of a checkpoint folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != "cache_key.json":
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _random_model(config: ModelConfig, tokenizer_folder: Path, seed: int, cache: Path) -> Path:
    from transformers import AutoTokenizer

    from learner.initialize import initialize

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    vocabulary = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    settings = {"model_type": config.family, **vocabulary, **config.hf_config}

    def make(folder: Path) -> None:
        initialize(folder, settings, seed)
        for file in tokenizer_folder.iterdir():
            shutil.copy(file, folder)

    key = {"settings": settings, "tokenizer": folder_digest(tokenizer_folder), "seed": seed}
    try:
        return cached_folder(cache, "random", key, make)
    except ValueError as error:
        raise DataError(f"model: {error}") from error


def _upcycled_model(config: ModelConfig, seed: int, cache: Path) -> Path:
    settings = {"source": config.path, "experts": config.experts, "noise": config.noise, "seed": seed}
    source = Path(str(config.path))
    content = (
        folder_digest(source) if source.is_dir() else config.path
    )  # a package is pinned by the lock file

    def make(folder: Path) -> None:
        # In a process of its own: it needs several times the model's memory, which the driver would keep.
        options = [f"--{name}={value}" for name, value in {**settings, "out": folder}.items()]
        command = [sys.executable, "-m", "learner.upcycle", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise DataError(f"model: {reason.removeprefix('upcycle: ')}")

    return cached_folder(cache, "upcycled", {**settings, "content": content}, make)

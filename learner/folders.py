"""Model folders on disk, as transformers reads and writes them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

# What makes a folder usable as a model, beside the weights and config.json.
CARRIED_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration of a model folder. Raises FileNotFoundError when there is none."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not a model folder: it holds no config.json")
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the safetensors files in a model folder, on the CPU, in the type stored.

    Raises FileNotFoundError when there are none, ValueError when two files hold the same tensor.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors weights")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            names = list(stored.keys())
            twice = sorted(state.keys() & set(names))
            if twice:
                raise ValueError(f"{folder} stores {', '.join(twice)} twice")
            state |= {name: stored.get_tensor(name) for name in names}
    return state


def write_model(
    folder: Path,
    config: PretrainedConfig,
    state: Mapping[str, torch.Tensor],
    carry: Callable[[Path], object],
) -> None:
    """Write a model folder. `state` has the names of a checkpoint on disk; `carry` adds the tokenizer's
    files.

    Raises FileExistsError when `folder` holds something.
    """
    config = copy.deepcopy(config)
    dtypes = {tensor.dtype for tensor in state.values()}
    config.dtype = dtypes.pop() if len(dtypes) == 1 else None
    with new_folder(folder) as partial:
        config.save_pretrained(partial)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        carry(partial)


def carry_from(source: Path) -> Callable[[Path], None]:
    """Copies the tokenizer, chat template and generation settings of the folder `source`, those that it
    has.
    """

    def carry(target: Path) -> None:
        for name in CARRIED_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)

    return carry


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into that appears as `folder` when the block ends without an exception.

    Raises FileExistsError when `folder` holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

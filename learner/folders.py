"""Model folders on disk, as transformers reads and writes them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


class FolderState(Mapping[str, torch.Tensor]):
    """Every tensor of the safetensors files in a model folder, on the CPU, in the type stored, read when asked for.

    shapes: of all, without reading them; left_out: names that are not looked at. Raises FileNotFoundError when there
    are none, ValueError when two files hold the same tensor.
    """

    def __init__(self, folder: Path, left_out: Collection[str] = ()) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} holds no *.safetensors weights")
        self._stored: dict[str, Any] = {}  # the open file, which maps what is not read yet
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            stored = safe_open(file, framework="pt")
            names = [name for name in stored.keys() if name not in left_out]  # noqa: SIM118  # not a dictionary
            twice = sorted(self._stored.keys() & set(names))
            if twice:
                raise ValueError(f"{folder} stores {', '.join(twice)} twice")
            self._stored |= dict.fromkeys(names, stored)
            self.shapes |= {name: tuple(stored.get_slice(name).get_shape()) for name in names}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._stored[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """All of a `FolderState`, in memory. Raises as it does."""
    return dict(FolderState(folder))


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

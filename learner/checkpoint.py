"""Learner checkpoints: everything that the next step depends on, in safetensors and JSON.

A folder holds `weights.safetensors` (Megatron names), `optimizer.safetensors`, `rng.safetensors` and `state.json`.
Where N processes share a model there are N files of each kind, `weights-00000-of-0000N.safetensors`, each with what
that process is the first to hold: metadata then say which block of a tensor it is, or which elements of the flattened
block. Whoever loads reads the overlap of what is stored with what it holds itself, so that a checkpoint can be restored
under any layout. All processes must see the same file system.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from learner.families.architecture import Architecture
from learner.layout import Box, Place, whole

if TYPE_CHECKING:  # who reads a checkpoint's weights needs no Megatron-core
    from learner.optimizer import Optimizer
    from learner.ranks import Ranks

FORMAT = 1
_WEIGHTS, _OPTIMIZER, _RNG, _STATE = "weights", "optimizer", "rng", "state.json"
_PIECES = "pieces"


@dataclass(frozen=True)
class Piece:
    """What a file holds of a tensor: a block of it, or elements start to stop of that block, flattened."""

    box: Box
    elements: tuple[int, int] | None = None


class State:
    """What a process saves and restores. identity: plain values that must be equal when a checkpoint is restored."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        ranks: Ranks,
        architecture: Architecture,
        identity: Mapping[str, Any],
    ) -> None:
        self.parameters = dict(model.named_parameters())
        self.optimizer, self.ranks, self.identity = optimizer, ranks, dict(identity)
        self.names = {name: ranks.place.global_name(name, architecture) for name in self.parameters}

    def box(self, name: str) -> Box:
        """The block of the whole parameter that is the parameter `name` here."""
        return self.ranks.place.box(self.names[name], tuple(self.parameters[name].shape))

    def replica(self, name: str) -> int:
        """0 on one rank of those that hold this block."""
        replicas = self.optimizer.replicas.get(name)
        return 0 if replicas is None else replicas.index + (not replicas.counted)


def save(folder: Path, state: State) -> None:
    """Write a checkpoint into `folder`, which is made; every rank its part.

    Raises FileExistsError when `folder` exists.
    """
    ranks = state.ranks
    with ranks.together():
        if ranks.place.rank == 0:
            folder.mkdir(parents=True)
    with ranks.together():
        weights, moments = _weights(state), _moments(state)
        _save(_path(folder, _WEIGHTS, ranks.place), weights, ranks)
        _save(_path(folder, _OPTIMIZER, ranks.place), moments, ranks)
        save_file(_rng_state(), _path(folder, _RNG, ranks.place))
    if ranks.place.rank == 0:
        plain = {"format": FORMAT, "steps": state.optimizer.steps, "identity": state.identity}
        if ranks.count > 1:
            plain["ranks"] = ranks.count
        (folder / _STATE).write_text(json.dumps(plain, indent=2))
    ranks.barrier()


def load(folder: Path, state: State) -> None:
    """Restore what `save` wrote: under the same layout bit for bit, generators too.

    Raises FileNotFoundError when `folder` is no checkpoint or has lost files, and ValueError when it was written for
    another model, another precision map or another version of the format; nothing is restored then.
    """
    plain = _read_state(folder)
    saved, present = plain["identity"], json.loads(json.dumps(state.identity))
    differences = [
        f"{key}: checkpoint {saved.get(key)!r}, learner {present.get(key)!r}"
        for key in sorted(saved.keys() | present.keys())
        if saved.get(key) != present.get(key)
    ]
    if differences:
        raise ValueError(f"{folder} does not belong to this learner: " + "; ".join(differences))
    written_by = plain.get("ranks", 1)
    with ExitStack() as stack:
        weights, moments = (
            stack.enter_context(Stored(folder, kind, written_by)) for kind in (_WEIGHTS, _OPTIMIZER)
        )
        values = {name: weights.read(state.names[name], state.box(name)) for name in state.parameters}
        if any(values[name].dtype != parameter.dtype for name, parameter in state.parameters.items()):
            raise ValueError(f"{folder}: the weights stored are not those of this model")
        restored = dict(_read_moments(moments, state))
    with torch.no_grad():
        for name, parameter in state.parameters.items():
            parameter.copy_(values[name])
    state.optimizer.load_state(restored, plain["steps"])
    own = state.ranks.place if written_by == state.ranks.count else None
    files = sorted(folder.glob(f"{_RNG}*.safetensors"))
    _set_rng_state(load_file(_path(folder, _RNG, own) if own else files[0]))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, whole, by their Megatron names. Raises as `load` does."""
    with Stored(folder, _WEIGHTS, _read_state(folder).get("ranks", 1)) as weights:
        return {name: weights.read(name) for name in weights.names()}


class Stored:
    """The tensors in the files of one kind in a checkpoint, read as they are asked for."""

    def __init__(self, folder: Path, kind: str, written_by: int) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._pieces: defaultdict[str, list[tuple[Any, str, Piece]]] = defaultdict(list)
        files = [_name(kind, rank, written_by) for rank in range(written_by)]
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder} is not whole: {', '.join(missing)} is missing")
        for file in files:
            opened = self._stack.enter_context(safe_open(folder / file, framework="pt"))
            described = json.loads((opened.metadata() or {}).get(_PIECES, "{}"))
            for key in opened.keys():  # noqa: SIM118  # not a dictionary
                piece = (
                    _from_plain(described[key])
                    if key in described
                    else Piece(whole(tuple(opened.get_slice(key).get_shape())))
                )
                self._pieces[key].append((opened, key, piece))

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def names(self) -> list[str]:
        return list(self._pieces)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """The block `box` of a tensor, or all of it. Raises ValueError when the files do not have it."""
        wanted = box or self._extent(name)
        result: torch.Tensor | None = None
        missing = math.prod(wanted.shape)
        for stored_box, block in self._blocks(name, wanted):
            if result is None:
                result = block.new_empty(wanted.shape)
            overlap = stored_box.overlap(wanted)
            if overlap is None:  # a scalar
                overlap = wanted
            result[overlap.within(wanted).slices] = block[overlap.within(stored_box).slices]
            missing -= math.prod(overlap.shape)
        if result is None or missing:
            raise ValueError(f"{self.folder}: the weights stored are not those of this model: {name}")
        return result

    def _extent(self, name: str) -> Box:
        boxes = [piece.box for _, _, piece in self._pieces[name]]
        ends = zip(
            *((a + n for a, n in zip(box.start, box.shape, strict=True)) for box in boxes), strict=True
        )
        return whole(tuple(max(end) for end in ends))

    def _blocks(self, name: str, wanted: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """The stored blocks that overlap, put together from their elements where these are in different files."""
        by_box: defaultdict[Box, list[tuple[Any, str, Piece]]] = defaultdict(list)
        for opened, key, piece in self._pieces.get(name, []):
            if len(piece.box.shape) != len(wanted.shape):
                return
            if not wanted.shape or piece.box.overlap(wanted):
                by_box[piece.box].append((opened, key, piece))
        for box, parts in by_box.items():
            if parts[0][2].elements is None:
                yield box, parts[0][0].get_tensor(parts[0][1])
                continue
            parts.sort(key=lambda part: part[2].elements or (0, 0))
            flat = torch.cat([opened.get_tensor(key) for opened, key, _ in parts])
            if flat.numel() == math.prod(box.shape):
                yield box, flat.view(box.shape)


def _weights(state: State) -> dict[str, tuple[Piece, torch.Tensor]]:
    return {
        state.names[name]: (Piece(state.box(name)), parameter.detach())
        for name, parameter in state.parameters.items()
        if state.replica(name) == 0
    }


def _moments(state: State) -> dict[str, tuple[Piece, torch.Tensor]]:
    found = {}
    for key, tensor in state.optimizer.state().items():
        name, part = key.rsplit("/", 1)
        replicas, own = state.optimizer.replicas.get(name), state.optimizer.slices.get(name)
        if replicas is not None and not replicas.counted:
            continue
        if not tensor.dim():
            if state.replica(name) == 0:
                found[f"{state.names[name]}/{part}"] = (Piece(whole(())), tensor)
            continue
        elements = None if own is None else (own.start, own.stop)
        found[f"{state.names[name]}/{part}"] = (Piece(state.box(name), elements), tensor)
    return found


def _read_moments(stored: Stored, state: State) -> Iterator[tuple[str, torch.Tensor]]:
    parts: defaultdict[str, list[str]] = defaultdict(list)
    for key in stored.names():
        name, part = key.rsplit("/", 1)
        parts[name].append(part)
    for name in state.parameters:
        own = state.optimizer.slices.get(name)
        for part in parts[state.names[name]]:
            scalar = part == "step"
            value = stored.read(f"{state.names[name]}/{part}", whole(()) if scalar else state.box(name))
            yield f"{name}/{part}", value if scalar or own is None else value.flatten()[own.start : own.stop]


def _read_state(folder: Path) -> dict[str, Any]:
    if not (folder / _STATE).is_file():
        raise FileNotFoundError(f"{folder} is not a learner checkpoint: it holds no state.json")
    plain = json.loads((folder / _STATE).read_text())
    if plain["format"] != FORMAT:
        raise ValueError(f"{folder} has checkpoint format {plain['format']}, expected {FORMAT}")
    return plain


def _save(path: Path, tensors: Mapping[str, tuple[Piece, torch.Tensor]], ranks: Ranks) -> None:
    plain = {name: tensor.cpu().contiguous() for name, (_, tensor) in tensors.items()}
    pieces = {name: _to_plain(piece) for name, (piece, _) in tensors.items()}
    save_file(plain, path, metadata={_PIECES: json.dumps(pieces)} if ranks.count > 1 else None)


def _to_plain(piece: Piece) -> list[Any]:
    return [piece.box.start, piece.box.shape, piece.elements]


def _from_plain(plain: list[Any]) -> Piece:
    start, shape, elements = plain
    return Piece(Box(tuple(start), tuple(shape)), tuple(elements) if elements else None)


def _name(kind: str, rank: int, ranks: int) -> str:
    return f"{kind}.safetensors" if ranks == 1 else f"{kind}-{rank:05d}-of-{ranks:05d}.safetensors"


def _path(folder: Path, kind: str, place: Place) -> Path:
    return folder / _name(kind, place.rank, place.layout.ranks)


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])

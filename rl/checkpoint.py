"""Checkpoints that exist whole or not at all.

    checkpoints/step_000012/
        ...             what the writer wrote
        state.json      the driver's state
        manifest.json   size and SHA-256 of every file above
        COMPLETE        SHA-256 of the manifest; written last

A checkpoint is written beside its place, flushed to disk and renamed into it. A kill at any instant leaves
the former or the new one. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.disk import room_for

log = logging.getLogger(__name__)

_STATE, _MANIFEST, _MARKER = "state.json", "manifest.json", "COMPLETE"
_SCRATCH = ".scratch-"  # prefix of folders being written or deleted
# ".former" is what a second save of the same step moves aside; it counts only while its successor is not in
# place.
_NAME = re.compile(r"step_(\d{6,})(\.former)?")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, its step and the driver's state."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the names and contents of its files."""
        return (self.path / _MARKER).read_text()


class _Broken(Exception):
    """Why a folder is not a complete checkpoint."""


class CheckpointStore:
    """The checkpoints of one run; the newest `keep` are kept. One writer, any number of readers."""

    def __init__(self, folder: Path, keep: int):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept")
        self.folder = folder
        self.keep = keep

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Make checkpoint `step`: `write(folder)` fills a folder with files, `state` (plain JSON) joins them.

        Afterwards older ones beyond `keep` are gone, and so are those of later steps: they belong to a course
        of the run that was abandoned when it was resumed from an earlier step.

        Raises ValueError for a negative step, a state that JSON does not give back, or a writer that leaves
        symbolic links or files with the names above; DiskFull; and whatever `write` raises. Then nothing has changed.
        """
        if step < 0:
            raise ValueError(f"checkpoint step={step}: must not be negative")
        text = _state_text(state)
        with room_for(self.folder / f"step_{step:06d}"):
            path = self._write(step, write, text)
        self._prune(step)
        return path

    def _write(self, step: int, write: Callable[[Path], None], state: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{_SCRATCH}*"):  # of a writer that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{step}-", dir=self.folder))
        try:
            scratch.chmod(0o755)
            write(scratch)
            _seal(scratch, step, state)
            return self._put_in_place(scratch, step)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    def latest_complete(self) -> Checkpoint | None:
        """The complete checkpoint of the highest step, every checksum verified; None when there is none.

        Broken ones are skipped with a warning. Changes nothing on disk.
        """
        verified = (self._verified(path, step) for step, path in sorted(self._folders(), reverse=True))
        return next((checkpoint for checkpoint in verified if checkpoint), None)

    def complete(self, step: int) -> Checkpoint | None:
        """The checkpoint of `step`, every checksum verified; None, with a warning that says why, if it is not whole."""
        for found, path in self._folders():
            if found == step:
                return self._verified(path, step)
        return None

    def steps(self) -> list[int]:
        """Steps of the checkpoints in place, ascending, by their sizes complete (contents are not read)."""
        return [step for step, path in sorted(self._folders()) if _has_all_files(path, step)]

    def _verified(self, path: Path, step: int) -> Checkpoint | None:
        try:
            _verify(path, step, contents=True)
            return Checkpoint(path, step, json.loads((path / _STATE).read_bytes()))
        except _Broken as reason:
            log.warning("checkpoint %s is skipped: %s", path, reason)
            return None

    def _put_in_place(self, scratch: Path, step: int) -> Path:
        path = self.folder / f"step_{step:06d}"
        former = path.with_name(path.name + ".former")
        if path.exists():
            self._remove(former)
            path.rename(former)
        scratch.rename(path)
        _sync_folder(self.folder)
        return path

    def _prune(self, newest: int) -> None:
        """Remove what the checkpoint just written makes superfluous. It itself is known to be good."""
        kept = {newest}
        for step, path in sorted(self._folders(), reverse=True):
            if step < newest and len(kept) < self.keep and _has_all_files(path, step):
                kept.add(step)
            elif step != newest:
                self._remove(path)
        for former in self.folder.glob("*.former"):
            self._remove(former)

    def _remove(self, path: Path) -> None:
        """Delete a folder by way of a scratch name, so that half of it never looks like a checkpoint."""
        if not path.exists():
            return
        try:
            doomed = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self.folder))
            path.rename(doomed / path.name)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("old checkpoint %s could not be removed: %s", path, error)

    def _folders(self) -> Iterator[tuple[int, Path]]:
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            superseded = path.suffix == ".former" and path.with_suffix("").exists()
            if match and path.is_dir() and not superseded:
                yield int(match[1]), path


def _state_text(state: dict[str, Any]) -> str:
    try:
        text = json.dumps(state, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"checkpoint state is not plain JSON: {error}") from error
    if json.loads(text) != state:
        raise ValueError(
            "checkpoint state changes on its way through JSON: keys must be strings, sequences lists"
        )
    return text


def _seal(folder: Path, step: int, state: str) -> None:
    """Add state, manifest and marker to what was written, and flush everything to disk."""
    reserved = [name for name in (_STATE, _MANIFEST, _MARKER) if (folder / name).exists()]
    links = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink()]
    if reserved or links:
        raise ValueError(f"a checkpoint's writer must not make {', '.join(reserved + links)}")
    (folder / _STATE).write_text(state, encoding="utf-8")
    entries = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _sync_file(path)
        entries[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    manifest = json.dumps({"step": step, "files": entries}, indent=1)
    for name, text in ((_MANIFEST, manifest), (_MARKER, hashlib.sha256(manifest.encode()).hexdigest())):
        (folder / name).write_text(text, encoding="utf-8")
        _sync_file(folder / name)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _sync_folder(path)


def _verify(folder: Path, step: int, contents: bool) -> None:
    """Raise _Broken unless `folder` is the complete checkpoint `step`; files are hashed when `contents`."""
    try:
        manifest = (folder / _MANIFEST).read_bytes()
        marker = (folder / _MARKER).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _Broken(f"it was not finished ({error})") from error
    if hashlib.sha256(manifest).hexdigest() != marker:
        raise _Broken(f"{_MANIFEST} does not have the checksum in {_MARKER}")
    described = json.loads(manifest)
    if described["step"] != step:
        raise _Broken(f"it holds step {described['step']}")
    for name, entry in described["files"].items():
        path = folder / name
        try:
            if path.stat().st_size != entry["size"]:
                raise _Broken(f"{name} has {path.stat().st_size} bytes instead of {entry['size']}")
            if contents and _sha256(path) != entry["sha256"]:
                raise _Broken(f"{name} has another checksum than when it was written")
        except OSError as error:
            raise _Broken(f"{name} cannot be read ({error})") from error


def _has_all_files(folder: Path, step: int) -> bool:
    try:
        _verify(folder, step, contents=False)
    except _Broken:
        return False
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_sync_folder = _sync_file  # on Linux a folder is flushed like a file

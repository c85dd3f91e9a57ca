"""The folder of a run. Nothing else is written by a run, and no two runs share one.

<output>/<name>/<time>/    made whole or not at all, never reused
    config.yaml            the resolved configuration
    run.json               where, from what and how it was run (`rl.records.provenance`)
    metrics.jsonl          one JSON object a line (`rl.records.history`)
    run.log                log of the driver
    learner.log, sampler.log, weight_sync.log      what these processes print (`rl.actors`)
    sampler_1.log, ...                             further samplers
    reference.log, critic.log                      the same, where the objective has them
    learner.1.log, ...                             of further processes that share such a model (`rl.actor_group`)
    rewards.log            what verifiers print, where they run in processes (`rl.rewards.pool`)
    checkpoints/           step_000012/, ... (`rl.checkpoint`)
    report.html            (`rl.records.report`)
    wandb/                 W&B's files and mirror.log, unless it is off
<output>/<name>/latest     symbolic link to the newest of them
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from rl.checkpoint import Checkpoint, CheckpointStore
from rl.disk import room_for
from rl.errors import UserError


class RunFolderError(UserError):
    """A folder that is not a run's, or cannot be used as asked."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside an existing run folder."""

    path: Path

    @classmethod
    def create(cls, output: Path, name: str, config_yaml: str) -> RunFolder:
        """Make `output/name/<time>/` with `config_yaml` in it and point `latest` at it.

        Runs started in the same second get the suffixes -2, -3, ... Raises RunFolderError when the file
        system refuses.
        """
        parent = output / name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
            try:
                (scratch / "config.yaml").write_text(config_yaml, encoding="utf-8")
                (scratch / "checkpoints").mkdir()
                scratch.chmod(0o755)
                path = _rename_to_free_name(scratch, f"{datetime.now():%Y%m%d-%H%M%S}")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            _point(parent / "latest", path.name)
        except OSError as error:
            raise RunFolderError(f"{parent}: cannot create a run folder: {error}") from error
        return cls(path.resolve())

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run folder (`latest` may be named). Raises RunFolderError."""
        if not path.is_dir():
            raise RunFolderError(f"{path}: no such run folder")
        if not (path / "config.yaml").is_file():
            hint = f"; did you mean {path / 'latest'}?" if (path / "latest").is_dir() else ""
            raise RunFolderError(f"{path}: not a run folder (config.yaml is missing){hint}")
        return cls(path.resolve())

    def checkpoint_to_resume(self, keep: int) -> Checkpoint | None:
        """The newest complete checkpoint; None for a run that was stopped before its first one.

        Raises RunFolderError when there are checkpoints, but none is complete.
        """
        store = CheckpointStore(self.checkpoints, keep)
        checkpoint = store.latest_complete()
        if checkpoint is None and any(self.checkpoints.glob("step_*")):
            raise RunFolderError(
                f"{self.path}: no complete checkpoint to resume from; start a new run instead"
            )
        return checkpoint

    def replace_config(self, config_yaml: str) -> None:
        """Save the configuration with which the run goes on from here."""
        write_atomically(self.config, config_yaml)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def title(self) -> str:
        """`name/time`."""
        return f"{self.path.parent.name}/{self.path.name}"


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file holding `text`; a reader, or a kill, finds the old file or the new one.

    Raises DiskFull.
    """
    with room_for(path):
        _write_atomically(path, text)


def _write_atomically(path: Path, text: str) -> None:
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def _rename_to_free_name(scratch: Path, stem: str) -> Path:
    """Rename onto a name that no run has: the system refuses a rename onto a folder that is not empty."""
    for number in count(1):
        path = scratch.with_name(stem if number == 1 else f"{stem}-{number}")
        try:
            return scratch.rename(path)
        except OSError:
            if not path.exists():
                raise
    raise AssertionError("unreachable")


def _point(link: Path, target: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".latest-", dir=link.parent) as scratch:
        new = Path(scratch) / "latest"
        new.symlink_to(target)
        os.replace(new, link)

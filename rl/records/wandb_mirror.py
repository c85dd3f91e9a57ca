"""The W&B mirror of a run: a process that follows metrics.jsonl and repeats it to W&B.

    python -m rl.records.wandb_mirror RUN_FOLDER offline|online PROJECT PARENT_PID

It ends when its standard input is closed or the process that started it is gone, and sends the rest first.
W&B sees the metrics of the run and its configuration, and nothing else: no code, git state, machine data,
console output or crash reports. Every session replays the run from its first step, so that the newest offline
folder holds all of it; steps that the server has are left out.
"""

from __future__ import annotations

import os
import secrets
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rl.records.history import decode_line
from rl.run_folder import RunFolder, write_atomically

POLL_S = 1.0


def mirror(folder: RunFolder, mode: str, project: str, parent: int) -> None:
    """Follow the run until it ends. Raises what W&B raises when it cannot start."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # before wandb is imported
    os.environ["WANDB_DIR"] = str(folder.path)
    os.environ["WANDB_CACHE_DIR"] = str(folder.wandb / "cache")  # and not in the user's home
    import wandb

    run = wandb.init(
        mode="online" if mode == "online" else "offline",
        project=project,
        id=run_id(folder),
        name=folder.title,
        resume="allow",
        dir=str(folder.path),
        settings=wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        ),
    )
    record_config(run, folder)
    first = run.step
    for line in follow(folder.metrics, parent):
        step, metrics = decode_line(line)
        if step >= first:
            run.log(metrics, step=step)
    run.finish()


def record_config(run: Any, folder: RunFolder) -> None:
    """Give W&B the run's configuration; a resumed run may have changed, say, its length."""
    run.config.update(_config(folder), allow_val_change=True)


def run_id(folder: RunFolder) -> str:
    """The id under which W&B knows the run, made at its first start."""
    path = folder.wandb / "id"
    if not path.exists():
        folder.wandb.mkdir(exist_ok=True)
        write_atomically(path, secrets.token_hex(4))
    return path.read_text()


def follow(path: Path, parent: int) -> Iterator[str]:
    """The complete lines of a growing file, until standard input is closed or `parent` is gone."""
    position, last_look = 0, False
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                complete, newline, _ = file.read().rpartition(b"\n")
            position += len(complete + newline)
            yield from (complete + newline).decode().splitlines(keepends=True)
        if last_look:
            return
        closed = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        last_look = closed or os.getppid() != parent


def _config(folder: RunFolder) -> dict[str, Any]:
    return yaml.safe_load(folder.config.read_text(encoding="utf-8")) or {}


def main(arguments: list[str]) -> None:
    path, mode, project, parent = arguments
    mirror(RunFolder.open(Path(path)), mode, project, int(parent))


if __name__ == "__main__":
    main(sys.argv[1:])

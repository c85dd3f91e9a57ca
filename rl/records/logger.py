"""The one place through which a run records numbers: metrics.jsonl, and W&B as a mirror of it."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from rl.disk import append, room_for
from rl.metrics import numbers
from rl.records.history import cut_back, encode_line, read_history
from rl.run_folder import RunFolder, RunFolderError

log = logging.getLogger(__name__)

WandbMode = Literal["off", "offline", "online"]


class RunLogger:
    """Appends the metrics of each step to metrics.jsonl; every line is on disk when `log` returns.

    Record a step before saving its checkpoint. With `resumed_at` (the step of the checkpoint that the run
    goes on from; None for a new run) later lines are removed first, so that the file of an interrupted run
    equals that of an uninterrupted one.

    W&B runs in a process of its own that reads metrics.jsonl (`rl.records.wandb_mirror`). Whatever happens to
    it is reported once, and neither stops nor delays the run; `close` gives it `wandb_patience_s` seconds to
    finish.

    Raises RunFolderError when another process records this run, when a new run's folder holds metrics, or
    when the metrics up to `resumed_at` are damaged.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        wandb: WandbMode = "off",
        project: str = "minite",
        resumed_at: int | None = None,
        wandb_patience_s: float = 60.0,
    ):
        self.folder = folder
        self._claim = _claim(folder)
        try:
            self._recorded = self._open_history(resumed_at)
            self._file = folder.metrics.open("ab", buffering=0)
        except BaseException:
            os.close(self._claim)
            raise
        self._wandb = None if wandb == "off" else _start_wandb(folder, wandb, project, wandb_patience_s)

    def has(self, step: int, name: str) -> bool:
        """Whether `name` is recorded at `step`, which is the last one recorded."""
        last, names = self._recorded
        return step == last and name in names

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Record `metrics` at `step`; a step may be recorded in parts.

        Raises what `rl.metrics.number` raises; ValueError for a step before the last recorded one, or a
        metric that the step already has; DiskFull. Then nothing has been recorded.
        """
        values = numbers(metrics)
        last, names = self._recorded
        if step < last:
            raise ValueError(f"step {step} comes after step {last}: steps must not decrease")
        known = names if step == last else set()
        if known & values.keys():
            raise ValueError(f"step {step} already has {', '.join(sorted(known & values.keys()))}")
        with room_for(self.folder.metrics):
            append(self._file, encode_line(step, values).encode())
        self._recorded = (step, known | values.keys())
        if self._wandb:
            self._wandb.check()

    def close(self) -> None:
        """Finish W&B and release the folder. May be called twice."""
        if self._file.closed:
            return
        self._file.close()
        if self._wandb:
            self._wandb.finish()
        os.close(self._claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_history(self, resumed_at: int | None) -> tuple[int, set[str]]:
        """Last step recorded and the names it has."""
        path = self.folder.metrics
        if resumed_at is None:
            if path.exists() and path.stat().st_size:
                raise RunFolderError(f"{path} holds metrics already; resume the run or start another")
            return 0, set()
        try:
            cut_back(path, resumed_at)
            history = read_history(path)
        except ValueError as error:
            raise RunFolderError(f"the metrics of the run are damaged: {error}") from error
        last = max(history, default=0)
        if last < resumed_at:
            log.warning("%s ends at step %d, before the checkpoint of step %d", path, last, resumed_at)
        return last, set(history.get(last, ()))


class _WandbProcess:
    """The mirror, watched: it lives as long as its standard input is open, and then finishes."""

    def __init__(self, folder: RunFolder, mode: WandbMode, project: str, patience_s: float):
        self._patience_s = patience_s
        self._reported = False
        folder.wandb.mkdir(exist_ok=True)
        self._log = folder.wandb / "mirror.log"
        root = str(Path(__file__).resolve().parents[2])
        arguments = (folder.path, mode, project, os.getpid())
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rl.records.wandb_mirror", *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C stops the run; the mirror then finishes by itself
            )

    def check(self) -> None:
        """Report, once, that the mirror has ended before the run."""
        if self._process.poll() is not None:
            self._report(f"ended with status {self._process.returncode}")

    def finish(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            if self._process.wait(self._patience_s):
                self._report(f"ended with status {self._process.returncode}")
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._report(f"did not finish within {self._patience_s:g} s and was stopped")

    def _report(self, what: str) -> None:
        if not self._reported:
            self._reported = True
            reason = _last_line(self._log)
            log.warning(
                "W&B %s (%s). The run is not affected: its metrics are in metrics.jsonl", what, reason
            )


def _start_wandb(folder: RunFolder, mode: WandbMode, project: str, patience_s: float) -> _WandbProcess | None:
    try:
        return _WandbProcess(folder, mode, project, patience_s)
    except OSError as error:
        log.warning("W&B cannot be started (%s). The run is not affected", error)
        return None


def _claim(folder: RunFolder) -> int:
    """Lock the folder for as long as this process lives. Returns the descriptor that holds the lock."""
    descriptor = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunFolderError(f"{folder.path}: another process is recording this run") from None
    except OSError as error:  # some network file systems have no locks
        log.warning("%s cannot be locked (%s): do not run it twice at the same time", folder.path, error)
    return descriptor


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return f"{path}: {lines[-1].strip()}" if lines else str(path)

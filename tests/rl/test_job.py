"""How a job ends that cannot go on: one line, exit status 1 or 2, and what was recorded before."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import ray

import rl.job
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.deaths import ActorDied
from rl.errors import DiskFull
from rl.job import has_learned
from rl.records.history import read_history
from rl.run_folder import RunFolder
from rl.train import main

TIMED_OUT = (
    "The current node timed out during startup. This could happen because the raylet failed\nto startup."
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def overrides(tmp_path: Path, cache: Path) -> list[str]:
    places = [f"run.output_dir={tmp_path}", f"run.cache_dir={cache}"]
    return ["+recipe=tiny", *places, "model.warm_start.steps=0", "logging.wandb=off"]


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("message", [TIMED_OUT, ""])
def test_a_ray_that_does_not_start_ends_the_command_in_one_line(
    message: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def start(**_: object) -> None:
        raise Exception(message)

    monkeypatch.setattr(ray, "init", start)
    assert main(overrides(tmp_path, cache)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: Ray did not start: ") and error.count("\n") == 1
    assert "start again when other work is done" in error
    if message:
        assert "The current node timed out during startup." in error
    assert (tmp_path / "tiny" / "latest" / "report.html").exists()


def test_a_disk_that_is_full_ends_the_command_in_one_line_that_says_how_to_go_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def start(**_: object) -> None:
        [folder] = (path for path in (tmp_path / "tiny").iterdir() if not path.is_symlink())
        CheckpointStore(folder / "checkpoints", 1).save(1, full_disk, {})

    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(rl.job, "start_engines", lambda *_: start())
    assert main(overrides(tmp_path, cache)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert "step_000001 is not written: the disk is full" in captured.err
    assert "make room, then go on with run.resume=" in captured.err
    latest = tmp_path / "tiny" / "latest"
    assert not list((latest / "checkpoints").iterdir()) and not (latest / "report.html").exists()


def test_the_death_of_an_engine_ends_the_command_in_one_line_that_says_how_to_go_on(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def start(*_: object) -> None:
        raise ActorDied("sampler 0")

    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(rl.job, "start_engines", start)
    assert main(overrides(tmp_path, cache)) == 1
    assert capsys.readouterr().err == "error: sampler 0 died; go on with run.resume=<the run's folder>\n"
    assert (tmp_path / "tiny" / "latest" / "report.html").exists()


def test_a_report_without_room_is_an_error_of_its_own_only_where_nothing_else_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder = RunFolder.create(tmp_path, "run", "run: {iterations: 3}\n")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(DiskFull, match=r"report\.html"):
        rl.job._report(folder, None)
    monkeypatch.setattr(logging.getLogger("rl"), "propagate", True)
    rl.job._report(folder, RuntimeError("an engine died"))
    assert {record.exc_info for record in caplog.records} == {None}
    assert not folder.report.exists() and read_history(folder.metrics) == {}


def test_a_log_without_room_loses_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]):
    handler = rl.job._LogFile("/dev/full")  # the system's disk that is always full
    handler.emit(logging.LogRecord("rl", logging.INFO, "", 0, "a line", (), None))
    handler.close()
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


@pytest.mark.parametrize(
    ("steps", "begun_from", "learned"),
    [
        ([], None, False),
        ([0], None, False),
        ([0, 4], None, True),
        ([10, 16], 16, False),
        ([16, 20], 16, True),
    ],
)
def test_a_launch_has_learned_when_it_leaves_a_later_checkpoint(
    steps: list[int], begun_from: int | None, learned: bool, tmp_path: Path
):
    checkpoint = None if begun_from is None else Checkpoint(step=begun_from, path=tmp_path, state={})
    assert has_learned(steps, checkpoint) is learned

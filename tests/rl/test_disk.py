"""A full disk: whatever is being written is whole or not there, and the error says which file it was."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest

from rl.checkpoint import CheckpointStore
from rl.disk import append, room_for
from rl.errors import DiskFull
from rl.evaluation.samples import Sample, SampleFile
from rl.models import cached_folder
from rl.records.logger import RunLogger
from rl.records.report import main as report_command
from rl.run_folder import RunFolder, write_atomically


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_space_in_rust(*_: object) -> None:
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


class NearlyFull(FileIO):
    """Takes a few bytes and then no more."""

    room = 10

    def write(self, data: object) -> int:
        if not self.room:
            no_space()
        taken = super().write(memoryview(data)[: self.room])  # type: ignore[arg-type]
        self.room -= taken
        return taken


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and what is written from there on does not get to the disk."""
    return lambda: monkeypatch.setattr(os, "fsync", no_space)


@pytest.mark.parametrize("write", [no_space, no_space_in_rust])
def test_only_the_error_of_a_full_disk_becomes_one_that_names_the_file(write: Callable[[], None]):
    with (
        pytest.raises(DiskFull, match="/some/file is not written: the disk is full"),
        room_for(Path("/some/file")),
    ):
        write()
    with pytest.raises(PermissionError), room_for(Path("/some/file")):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with pytest.raises(KeyboardInterrupt), room_for(Path("/some/file")):
        raise KeyboardInterrupt


def test_what_does_not_fit_behind_the_others_leaves_no_half_of_it(tmp_path: Path):
    path = tmp_path / "lines"
    with path.open("ab", buffering=0) as file:
        append(file, b"first\n")
    with NearlyFull(path, "ab") as file, pytest.raises(OSError, match="No space left"):
        append(file, b"a longer second\n")
    assert path.read_bytes() == b"first\n"
    with path.open("ab", buffering=0) as file:
        append(file, b"a longer second\n")
    assert path.read_bytes() == b"first\na longer second\n"


def test_a_file_is_replaced_whole_or_not(tmp_path: Path, full: Callable[[], None]):
    path = tmp_path / "file"
    write_atomically(path, "old")
    full()
    with pytest.raises(DiskFull, match=str(path)):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fails", ["writer", "library", "flush"])
def test_a_checkpoint_that_does_not_fit_leaves_those_before_it(
    tmp_path: Path, full: Callable[[], None], fails: str
):
    store = CheckpointStore(tmp_path, 1)
    store.save(3, lambda folder: None, {"a": 1})
    before = sorted(tmp_path.rglob("*"))
    if fails == "flush":
        full()

    def write(folder: Path) -> None:
        (folder / "part").write_text("half")
        {"writer": no_space, "library": no_space_in_rust, "flush": lambda: None}[fails]()

    with pytest.raises(DiskFull, match="step_000004 is not written"):
        store.save(4, write, {"a": 2})
    assert sorted(tmp_path.rglob("*")) == before
    found = store.latest_complete()
    assert found is not None and (found.step, found.state) == (3, {"a": 1})


def test_metrics_that_do_not_fit_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder.create(tmp_path, "run", "")
    with RunLogger(folder) as logger:
        logger.log(1, {"policy/loss": 0.5})
        before = folder.metrics.read_bytes()
        with NearlyFull(folder.metrics, "ab") as file, monkeypatch.context() as change:
            change.setattr(logger, "_file", file)
            with pytest.raises(DiskFull, match=str(folder.metrics)):
                logger.log(2, {"policy/loss": 0.25})
        assert folder.metrics.read_bytes() == before
        logger.log(2, {"policy/loss": 0.25})  # there is room again
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2]


def test_samples_that_do_not_fit_are_not_kept(tmp_path: Path, full: Callable[[], None]):
    def sample(position: int) -> Sample:
        return Sample("1", position, 0, 7, "2", 1, "stop", True)

    file = SampleFile(tmp_path / "samples.jsonl")
    file.append([sample(0)])
    full()
    with pytest.raises(DiskFull, match=r"samples\.jsonl"):
        file.append([sample(1), sample(2)])
    assert list(file.samples) == list(SampleFile(file.path).samples) == [(0, 0)]


def test_a_cached_model_that_does_not_fit_is_not_there(tmp_path: Path):
    def make(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        no_space_in_rust()

    with pytest.raises(DiskFull, match="warm-"):
        cached_folder(tmp_path, "warm", {"seed": 1}, make)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_does_not_fit_ends_its_command_in_one_line(
    tmp_path: Path, full: Callable[[], None], capsys: pytest.CaptureFixture[str]
):
    folder = RunFolder.create(tmp_path, "run", "run: {iterations: 3}\n")
    folder.report.write_text("the former one")
    full()
    assert report_command([str(folder.path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "report.html is not written" in error and error.count("\n") == 1
    assert folder.report.read_text() == "the former one"

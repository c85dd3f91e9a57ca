from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl.checkpoint import CheckpointStore
from rl.errors import UserError
from rl.run_folder import RunFolder, RunFolderError, write_atomically


def test_a_new_folder_holds_the_configuration_and_is_the_latest(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "outputs", "tiny", "run: {seed: 1}\n")
    second = RunFolder.create(tmp_path / "outputs", "tiny", "run: {seed: 2}\n")
    assert first.path != second.path
    assert first.config.read_text() == "run: {seed: 1}\n"
    latest = tmp_path / "outputs" / "tiny" / "latest"
    assert not os.path.isabs(os.readlink(latest))  # the tree may be moved
    assert RunFolder.open(latest) == second
    assert second.title == f"tiny/{second.path.name}"


def test_runs_that_start_together_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: (RunFolder.create(tmp_path, "tiny", f"{n}"), n), range(24)))
    assert len({folder.path for folder, _ in made}) == 24
    assert all(folder.config.read_text() == str(n) for folder, n in made)
    left = {path.name for path in (tmp_path / "tiny").iterdir()}
    assert left == {folder.path.name for folder, _ in made} | {"latest"}


def test_what_is_not_a_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such run folder"):
        RunFolder.open(tmp_path / "missing")
    RunFolder.create(tmp_path, "tiny", "")
    with pytest.raises(RunFolderError, match=r"config\.yaml is missing.*did you mean .*tiny/latest"):
        RunFolder.open(tmp_path / "tiny")
    with pytest.raises(UserError, match="cannot create"):
        RunFolder.create(tmp_path / "tiny" / "latest" / "config.yaml", "tiny", "")


def test_resuming_takes_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "tiny", "")
    assert folder.checkpoint_to_resume(keep=2) is None  # stopped before the first one: it starts anew
    saved = CheckpointStore(folder.checkpoints, 2).save(3, lambda path: None, {"a": 1})
    checkpoint = folder.checkpoint_to_resume(keep=2)
    assert checkpoint is not None and checkpoint.state == {"a": 1}
    (saved / "state.json").write_text("{}")
    with pytest.raises(RunFolderError, match="no complete checkpoint"):
        folder.checkpoint_to_resume(keep=2)  # a run with broken checkpoints does not start anew unasked


def test_a_failed_write_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_configuration_can_be_replaced(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "tiny", "a: 1\n")
    folder.replace_config("a: 2\n")
    assert folder.config.read_text() == "a: 2\n"

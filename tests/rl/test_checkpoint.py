from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.checkpoint import CheckpointStore


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing matters when the power fails, which no test here simulates, and takes long."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def _write(text: str):
    def write(folder: Path) -> None:
        (folder / "learner").mkdir()
        (folder / "learner" / "weights.bin").write_text(text)
        (folder / "empty").write_bytes(b"")

    return write


def _store(tmp_path: Path, *steps: int, keep: int = 10) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints", keep)
    for step in steps:
        store.save(step, _write(f"weights {step}"), {"step": step})
    return store


def _content(store: CheckpointStore) -> tuple[int, str]:
    found = store.latest_complete()
    assert found
    return found.step, (found.path / "learner" / "weights.bin").read_text()


def test_what_was_saved_is_found(tmp_path: Path) -> None:
    store = _store(tmp_path, 3, 12)
    found = store.latest_complete()
    assert found
    assert (found.path.name, found.step, found.state) == ("step_000012", 12, {"step": 12})
    assert (found.path / "learner" / "weights.bin").read_text() == "weights 12"
    assert store.steps() == [3, 12]


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "missing", 1).latest_complete() is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_states_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("store"), 1)
    try:
        store.save(0, lambda folder: None, state)
    except ValueError as error:
        assert "JSON" in str(error)  # lone surrogates have no UTF-8
    else:
        found = store.latest_complete()
        assert found and found.state == state


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": object()}])
def test_states_that_json_would_change_are_refused(tmp_path: Path, state: dict[Any, Any]) -> None:
    store = _store(tmp_path, 1)
    with pytest.raises(ValueError, match="JSON"):
        store.save(2, _write("new"), state)
    assert _content(store) == (1, "weights 1")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit": (lambda folder: _flip(folder / "learner" / "weights.bin"), "another checksum"),
    "a short file": (lambda folder: (folder / "learner" / "weights.bin").write_text("w"), "bytes instead of"),
    "a missing file": (lambda folder: (folder / "empty").unlink(), "empty cannot be read"),
    "no marker": (lambda folder: (folder / "COMPLETE").unlink(), "not finished"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "not finished"),
    "a changed manifest": (lambda folder: _flip(folder / "manifest.json"), "does not have the checksum"),
    "a changed state": (lambda folder: _flip(folder / "state.json"), "state.json has another checksum"),
    "another step's folder": (lambda folder: folder.rename(folder.with_name("step_000009")), "holds step 3"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_checkpoints_are_skipped_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = _store(tmp_path, 2, 3)
    break_it, reason = DAMAGE[damage]
    break_it(store.folder / "step_000003")
    with caplog.at_level(logging.WARNING):
        assert _content(store) == (2, "weights 2")
    assert len(caplog.records) == 1
    assert reason in caplog.text and "skipped" in caplog.text


def test_only_exact_names_count(tmp_path: Path) -> None:
    store = _store(tmp_path, 1)
    names = "step_000009.tmp xstep_000009 step_9 step_00000a .scratch-9-x step_000009.former.x"
    for name in names.split():
        shutil.copytree(store.folder / "step_000001", store.folder / name)
    (store.folder / "step_000010").write_text("a file")
    assert _content(store) == (1, "weights 1")
    assert store.steps() == [1]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = _store(tmp_path, 1, 2, 3, 4, keep=2)
    assert store.steps() == [3, 4]
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_000003", "step_000004"]


def test_a_broken_one_is_not_counted_among_the_kept(tmp_path: Path) -> None:
    store = _store(tmp_path, 1, 2, keep=2)
    (store.folder / "step_000002" / "COMPLETE").unlink()
    store.save(3, _write("weights 3"), {})
    assert store.steps() == [1, 3]


def test_going_on_from_an_earlier_step_removes_the_abandoned_course(tmp_path: Path) -> None:
    store = _store(tmp_path, 1, 9, keep=1)
    _store(tmp_path, 4, keep=1)
    assert store.steps() == [4]
    assert _content(store) == (4, "weights 4")


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = _store(tmp_path, 1, keep=1)
    store.save(1, _write("again"), {})
    assert _content(store) == (1, "again")
    assert [path.name for path in store.folder.iterdir()] == ["step_000001"]


def test_a_writer_that_fails_changes_nothing(tmp_path: Path) -> None:
    store = _store(tmp_path, 1)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(2, fail, {})
    assert [path.name for path in store.folder.iterdir()] == ["step_000001"]


def test_a_writer_may_not_use_reserved_names_or_links(tmp_path: Path) -> None:
    store = _store(tmp_path, 1)
    with pytest.raises(ValueError, match=r"state\.json"):
        store.save(2, lambda folder: (folder / "state.json").write_text("{}") and None, {})
    with pytest.raises(ValueError, match="link"):
        store.save(2, lambda folder: (folder / "link").symlink_to("/etc"), {})
    with pytest.raises(ValueError, match="step=-1"):
        store.save(-1, _write(""), {})
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointStore(tmp_path, 0)


def test_everything_is_on_disk_before_the_checkpoint_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    in_place: list[bool] = []

    def fsync(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        in_place.append((tmp_path / "checkpoints" / "step_000001").exists())

    monkeypatch.setattr(os, "fsync", fsync)
    _store(tmp_path, 1)
    before = [name for name, there in zip(flushed, in_place, strict=True) if not there]
    assert {"weights.bin", "empty", "state.json", "manifest.json", "COMPLETE", "learner"} <= set(before)
    assert before.index("COMPLETE") > max(before.index(name) for name in ("weights.bin", "manifest.json"))
    assert flushed[-1] == "checkpoints" and in_place[-1]


def test_an_old_checkpoint_that_cannot_be_removed_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = _store(tmp_path, 1, keep=1)

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "step_000001":
            raise PermissionError("busy")
        return original(self, target)

    original = Path.rename
    monkeypatch.setattr(Path, "rename", refuse)
    store.save(2, _write("weights 2"), {})
    assert _content(store) == (2, "weights 2")
    assert "could not be removed" in caplog.text


# Saves a checkpoint in a forked child that is killed before its n-th operation on the file system (as
# Python's audit events tell), for every n. After each kill the parent looks at what is left and saves again.
_KILL_EVERYWHERE = """
import json, os, shutil, signal, sys
from pathlib import Path
from rl.checkpoint import CheckpointStore

base, step, keep = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def write(folder):
    with (folder / "weights").open("w") as file:
        file.write("ne")
        file.flush()
        sys.audit("os.write")
        file.write("w")
    (folder / "sub").mkdir()
    (folder / "sub" / "more").write_text("new")


def save_and_die(folder, instant):
    left = instant

    def hook(event, arguments):
        nonlocal left
        if event == "open" or event.startswith(("os.", "shutil.")):
            left -= 1
            if left == -1:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    CheckpointStore(folder, keep).save(step, write, {"new": True})
    os._exit(0)


os.fsync = lambda descriptor: None  # it matters to a power failure, not to a kill
before = CheckpointStore(base / "before", 9)
before.save(0, lambda path: (path / "weights").write_text("older"), {})
before.save(1, lambda path: (path / "weights").write_text("old"), {"new": False})
seen = []
for instant in range(10_000):
    folder = base / str(instant)
    shutil.copytree(before.folder, folder)
    child = os.fork()
    if child == 0:
        save_and_die(folder, instant)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    store = CheckpointStore(folder, keep)
    found = store.latest_complete()
    seen.append((found.step, found.state["new"], (found.path / "weights").read_text()))
    store.save(step, write, {"new": True})
    left = sorted(path.name for path in folder.iterdir())
    assert left == [f"step_{kept:06d}" for kept in sorted({0, 1, step})[-keep:]], left
    shutil.rmtree(folder)
    if status == 0:
        break
print(json.dumps(seen))
"""


@pytest.mark.parametrize(("step", "keep"), [(1, 1), (2, 2)])
def test_a_kill_at_any_instant_leaves_the_old_or_the_new(tmp_path: Path, step: int, keep: int) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_KILL_EVERYWHERE), tmp_path, str(step), str(keep)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = [tuple(entry) for entry in json.loads(done.stdout)]
    old, new = (1, False, "old"), (step, True, "new")
    assert set(seen) == {old, new}
    assert len(seen) > 30
    assert seen == sorted(seen, key=lambda entry: entry == new)  # once in place, it stays

"""Model folders cached by content."""

from __future__ import annotations

from pathlib import Path

from rl.models import cached_folder


def test_runs_that_make_a_folder_at_the_same_time_take_that_of_the_first(tmp_path: Path):
    def make(name: str):
        def write(folder: Path) -> None:
            (folder / "config.json").write_text(name)
            if name == "late":  # meanwhile another run is done
                assert cached_folder(tmp_path, "warm", {"seed": 1}, make("early")).is_dir()

        return write

    folder = cached_folder(tmp_path, "warm", {"seed": 1}, make("late"))
    assert (folder / "config.json").read_text() == "early"
    assert list(tmp_path.iterdir()) == [folder]
    assert cached_folder(tmp_path, "warm", {"seed": 2}, make("early")) != folder

"""The quickstart says so when it has not learned what the README says it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl import quickstart
from rl.records.logger import RunLogger
from rl.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Calls the command; the training is replaced by one that records these rewards, and ends with this status."""
    monkeypatch.chdir(tmp_path)

    def call(rewards: dict[int, float], *overrides: str, status: int = 0) -> int:
        def train(arguments: list[str]) -> int:
            assert arguments == ["+recipe=tiny", "run.name=quickstart", *overrides]
            with RunLogger(RunFolder.create(Path("outputs"), "quickstart", "")) as logger:
                for step, reward in rewards.items():
                    logger.log(step, {"held_out/reward": reward})
                logger.log(max(rewards, default=0) + 1, {"reward/mean": 0.1})
            return status

        monkeypatch.setattr(quickstart.train, "main", train)
        return quickstart.main(list(overrides))

    return call


def test_a_run_that_learned_too_little_is_said_in_one_line_and_is_no_error(
    run, capsys: pytest.CaptureFixture[str]
):
    assert run({0: 0.9, 120: 0.8}) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "held_out/reward is 0.80 after iteration 120, expected is 0.85 or more" in captured.err
    assert re.search(r"run\.resume=\S+/quickstart/\d{8}-\d{6} run\.iterations=240 ", captured.err)


def test_a_run_without_evaluations_is_said(run, capsys: pytest.CaptureFixture[str]):
    assert run({}) == 0
    assert "held_out/reward is not recorded" in capsys.readouterr().err


def test_a_run_that_learned_enough_or_was_changed_or_failed_passes_without_a_word(
    run, capsys: pytest.CaptureFixture[str]
):
    assert run({0: 0.3, 110: 0.2, 120: 0.85}) == 0
    assert run({0: 0.3}, "run.iterations=2") == 0
    assert run({0: 0.3}, status=2) == 2
    assert capsys.readouterr().err == ""

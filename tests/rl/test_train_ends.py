"""The main job with the real engines, where it ends early: nothing that can be learned from, nothing left to learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.checkpoint import CheckpointStore
from rl.train import main
from tests.rl.smallest_job import arguments, run_folder

pytestmark = pytest.mark.slow

COLD = "model.warm_start.steps=0"  # what the policy knows does not matter


def test_a_sampler_under_another_specification_stops_before_the_first_rollout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    other = "+spec.sampler.weight.outer_domain=expert"
    assert main(arguments(tmp_path, COLD, "run.name=mismatch", other)) == 2
    output = "".join(capfd.readouterr())
    assert "weight.outer_domain" in output
    assert "Traceback" not in output
    assert (run_folder(tmp_path, "mismatch") / "metrics.jsonl").read_text() == ""


def test_a_run_that_solves_everything_ends_well_and_keeps_what_it_learned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    solved = "reward.function=tests.rl.custom_rewards:always_right"
    assert main(arguments(tmp_path, COLD, "run.name=solved", solved)) == 0
    output = "".join(capfd.readouterr())
    assert "every problem drawn is solved: the run ends after iteration 0" in output
    folder = run_folder(tmp_path, "solved")
    assert CheckpointStore(folder / "checkpoints", 2).steps() == [0]
    assert (folder / "report.html").exists()

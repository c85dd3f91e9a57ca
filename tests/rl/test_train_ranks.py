"""The main job with a sampler of two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.records.history import read_history
from rl.train import main
from tests.rl.smallest_job import arguments, run_folder

pytestmark = pytest.mark.slow


def test_a_run_learns_from_a_sampler_of_two_processes(tmp_path: Path) -> None:
    settings = (
        "model.warm_start.steps=0",
        "algorithm.dynamic_sampling=false",
        "sampler.tensor_parallel=2",
        "sync.codec=delta",
        "run.iterations=2",
        "run.name=ranks",
    )
    assert main(arguments(tmp_path, *settings)) == 0
    folder = run_folder(tmp_path, "ranks")
    assert (folder / "sampler.1.log").exists()
    history = read_history(folder / "metrics.jsonl")
    assert max(history) == 2
    assert history[1]["sync/changed_share"] > 0
    for step in (1, 2):  # as with one process: rounding of FP32, and what it flips
        assert history[step]["gap/p50"] < 2e-6
        assert history[step]["gap/p99"] < 5e-3

"""The main job with responses that are written in parts, by the weights of several iterations."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from rl.records.history import read_history
from rl.rollout_store import load_backlog
from rl.train import main
from tests.rl.rollouts import group
from tests.rl.smallest_job import ITERATIONS, arguments, run_folder

pytestmark = pytest.mark.slow

PARTS = (
    "spec=strict",
    "model.warm_start.steps=0",
    "reward.function=tests.rl.custom_rewards:even_length",
    "algorithm.partial_rollouts.token_budget=3",
    "algorithm.group_size=3",
    "algorithm.prompts_per_round=20",
    "algorithm.max_staleness=5",
)


def test_every_token_is_measured_against_the_weights_that_wrote_it(tmp_path: Path):
    """Under the strict spec: no gap where the learner has these weights, and one where it has later ones."""
    with redirect_stdout(StringIO()) as output:
        assert main(arguments(tmp_path, "run.name=parts", *PARTS)) == 0
    folder = run_folder(tmp_path, "parts")
    history = read_history(folder / "metrics.jsonl")
    iterations = [history[step] for step in range(1, ITERATIONS + 1)]
    for step, metrics in enumerate(iterations, 1):
        assert metrics["policy/log_ratio_abs"] == 0.0
        assert metrics["version/weights"] == step - metrics["staleness/max"] >= step - 5
        assert metrics.get("gap/max", 0.0) == 0.0
        assert metrics.get("gap/older_abs_mean", 0.0) > 0 or metrics["staleness/max"] == 0
    mixed = [metrics for metrics in iterations if metrics["staleness/older_tokens"]]
    assert any("gap/max" in metrics for metrics in mixed)
    assert all(0 < metrics["staleness/mean"] < metrics["staleness/max"] for metrics in mixed)
    assert max(metrics["partial/continued"] for metrics in iterations) > 10

    last = folder / f"checkpoints/step_{ITERATIONS:06d}/backlog"
    left = load_backlog(last, lambda position: group(position=position).prompt)
    assert f"the run ends, and {left}" in " ".join(output.getvalue().split())
    assert left.unfinished == iterations[-1]["partial/put_aside"] > 0

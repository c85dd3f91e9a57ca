"""The main job with all that a learner can have: critic and reference, routes replayed, rollouts drawn ahead and in
parts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.records.history import read_history
from tests.rl.smallest_job import (
    ITERATIONS,
    assert_equal_runs,
    finish,
    kill_when,
    recorded,
    run_folder,
    start,
)

pytestmark = pytest.mark.slow


def test_critic_reference_and_rollouts_drawn_ahead_outlive_a_kill(tmp_path: Path):
    """PPO with both, one step off, the sampler's experts replayed, responses in two parts; in the first iteration the
    critic learns alone.
    """
    settings = (
        "model.warm_start.steps=0",
        "reward.function=tests.rl.custom_rewards:even_length",
        "algorithm=ppo",
        "algorithm.objective.critic.warmup_iterations=1",
        "algorithm.pipeline=one_step_off",
        "algorithm.routing_replay=r3",
        "algorithm.partial_rollouts.token_budget=4",
        "algorithm.prompts_per_round=12",
        "algorithm.max_staleness=4",
    )
    finish(start(tmp_path, "run.name=ahead", *settings), tmp_path)
    whole = run_folder(tmp_path, "ahead")
    history = read_history(whole / "metrics.jsonl")
    iterations = [history[step] for step in range(1, ITERATIONS + 1)]
    ages = [metrics["staleness/max"] for metrics in iterations]
    assert ages[0] == 0 and 1 < max(ages) <= 4 and min(ages[1:]) >= 1
    assert [metrics["version/weights"] + age for metrics, age in zip(iterations, ages, strict=True)] == [
        1,
        2,
        3,
        4,
    ]
    assert any(metrics["partial/continued"] for metrics in iterations)
    assert all(0 <= metrics["gap/route_mismatch"] < 0.5 for metrics in iterations)
    assert ["policy/loss" in metrics for metrics in iterations] == [False, True, True, True]
    assert all("critic/loss" in metrics for metrics in iterations)
    assert history[1]["reward/kl_penalty"] == pytest.approx(0, abs=1e-6)  # the policy is the reference still
    assert history[4]["reward/kl_penalty"] != 0
    assert all(history[4][f"memory/{name}"] > 0 for name in ("critic", "reference"))

    process = start(tmp_path, "run.name=ahead_killed", *settings)
    kill_when(tmp_path, process, lambda: recorded(tmp_path, "ahead_killed") >= 2)
    folder = run_folder(tmp_path, "ahead_killed")
    finish(start(tmp_path, f"run.resume={folder}", "run.name=ahead_killed", *settings), tmp_path)
    assert_equal_runs(folder, whole, ("learner", "critic"))

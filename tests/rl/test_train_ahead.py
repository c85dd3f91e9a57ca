"""The main job with all that a learner can have: critic and reference, routes replayed, rollouts drawn ahead and in
parts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rl.records.history import read_history
from rl.train import main
from tests.rl.in_process import engines_in_process
from tests.rl.smallest_job import ITERATIONS, arguments, assert_equal_runs, run_folder

pytestmark = pytest.mark.slow


def test_critic_reference_and_rollouts_drawn_ahead_are_gone_on_with(tmp_path: Path):
    """PPO with both, one step off, the sampler's experts replayed, responses in two parts; in the first iteration the
    critic learns alone. The run that goes on has its engines in one process.
    """
    settings = arguments(
        tmp_path,
        "run.name=ahead",
        "run.keep_checkpoints=4",
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
    assert main(settings) == 0
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

    # As a run was left that was stopped after its second checkpoint
    folder = tmp_path / "stopped"
    shutil.copytree(whole, folder, symlinks=True)
    for step in (3, 4):
        shutil.rmtree(folder / f"checkpoints/step_{step:06d}")
    with engines_in_process():
        assert main([*settings, f"run.resume={folder}"]) == 0
    assert_equal_runs(folder, whole, ("learner", "critic"))

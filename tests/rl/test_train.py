"""The main job with the real engines (vLLM and Megatron-core on this machine's CPU), at its smallest."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

import rl.run_folder as run_folder_module
from kernels.catalogue import named_spec
from rl.checkpoint import CheckpointStore
from rl.records.history import comparable, read_history

pytestmark = pytest.mark.slow

ITERATIONS = 4
SMALLEST = [
    "+recipe=tiny",
    "data.bound=4",
    "data.held_out=3",
    "model.hf_config.num_hidden_layers=2",
    "model.hf_config.hidden_size=64",
    "model.warm_start.steps=40",
    "model.warm_start.batch_size=32",
    "algorithm.prompts_per_iteration=8",
    "algorithm.min_groups=2",
    f"run.iterations={ITERATIONS}",
    "run.checkpoint_every=1",
    "run.keep_checkpoints=2",
    "evaluation.every=2",
    "logging.wandb=off",
    "sampler.kv_cache_gib=0.25",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file go; they share the cached initial policy."""
    return tmp_path_factory.mktemp("runs")


def start(place: Path, *overrides: str) -> subprocess.Popen[bytes]:
    paths = [f"run.output_dir={place}", f"run.cache_dir={place / 'cache'}"]
    command = [sys.executable, "-m", "rl.train", *SMALLEST, *paths, *overrides]
    with (place / "output").open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[bytes], place: Path) -> str:
    process.wait(timeout=300)
    return (place / "output").read_text()


def run_folder(place: Path, name: str) -> Path:
    return (place / name / "latest").resolve()


@pytest.fixture(scope="module")
def uninterrupted(place: Path) -> Path:
    process = start(place, "run.name=uninterrupted")
    output = finish(process, place)
    assert process.returncode == 0, output
    assert f"report: {run_folder(place, 'uninterrupted')}/report.html" in output
    return run_folder(place, "uninterrupted")


def test_both_engines_ran_the_experts_under_one_specification(uninterrupted: Path):
    engines = {
        entry["engine"]: entry for entry in json.loads((uninterrupted / "run.json").read_text())["engines"]
    }
    assert set(engines) == {"megatron", "vllm", "weight_sync"}
    assert len({entry["fingerprint"] for entry in engines.values()}) == 1
    assert engines["megatron"]["expert_calls"] > 0
    assert engines["vllm"]["expert_calls"] > 0
    log = (uninterrupted / "run.log").read_text()
    [line] = [line for line in log.splitlines() if "execution specification" in line]
    assert "megatron, vllm, weight_sync" in line
    assert line.endswith(
        f"minite {named_spec('minite').fingerprint} in layers 0 to 1; precision map {engines['vllm']['fingerprint']}"
    )


def test_what_a_run_leaves_is_what_the_run_folder_describes(uninterrupted: Path):
    left = {path.name for path in uninterrupted.iterdir()}
    assert {"learner.log", "sampler.log", "weight_sync.log", "run.log", "report.html"} <= left
    assert not {name for name in left if name not in (run_folder_module.__doc__ or "")}
    assert {path.stat().st_mode & 0o777 for path in uninterrupted.glob("*.log")} == {0o644}


def test_every_step_is_recorded_and_finite(uninterrupted: Path):
    history = read_history(uninterrupted / "metrics.jsonl")
    assert list(history) == list(range(ITERATIONS + 1))
    assert all(math.isfinite(value) for metrics in history.values() for value in metrics.values())
    assert [step for step, metrics in history.items() if "held_out/reward" in metrics] == [0, 2, 4]
    for step in range(1, ITERATIONS + 1):
        assert history[step]["version/weights"] == step
        assert history[step]["groups/kept"] >= 2
        assert history[step]["gap/p99"] < 0.05  # aligned engines: nats, far below the clip bounds
        assert history[step]["policy/grad_norm"] > 0
    assert (uninterrupted / "report.html").stat().st_size > 100_000


def test_a_run_fits_into_eight_gib(uninterrupted: Path):
    last = read_history(uninterrupted / "metrics.jsonl")[ITERATIONS]
    assert sum(value for name, value in last.items() if name.startswith("memory/")) < 8 * 1024


def kill_when(place: Path, process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """SIGKILL the driver as soon as `condition` holds, and wait until its actors are gone.

    Two small agents of Ray look for the dead head for a minute before they end; they hold no model.
    """
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, f"the run ended by itself:\n{finish(process, place)}"
        assert time.monotonic() < deadline, "the moment to kill never came"
        time.sleep(0.002)
    family = psutil.Process(process.pid).children(recursive=True)
    engines = [member for member in family if "Agent" not in member.cmdline()[0]]
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(engines, timeout=60)
    assert not alive, f"left running: {alive}"


def test_a_run_killed_in_three_places_equals_the_uninterrupted_one(place: Path, uninterrupted: Path):
    process = start(place, "run.name=killed")
    # 1: after the first step was recorded, in the midst of saving or of the second iteration
    kill_when(place, process, lambda: _recorded(place, "killed") >= 1)
    folder = run_folder(place, "killed")
    resume = f"run.resume={folder}"
    # 2: while a checkpoint is being written
    kill_when(
        place,
        start(place, resume, "run.name=killed"),
        lambda: any((folder / "checkpoints").glob(".scratch-*")),
    )
    # 3: in the midst of an iteration, some time after a checkpoint is in place
    before = CheckpointStore(folder / "checkpoints", 2).steps()
    process = start(place, resume, "run.name=killed")
    kill_when(place, process, lambda: CheckpointStore(folder / "checkpoints", 2).steps() != before)
    process = start(place, resume, "run.name=killed")
    output = finish(process, place)
    assert process.returncode == 0, output

    assert_equal_runs(folder, uninterrupted)


def assert_equal_runs(folder: Path, other: Path, engines: Sequence[str] = ("learner",)) -> None:
    """All metrics but the volatile ones, and what the engines hold at the end, bit for bit."""
    assert comparable(read_history(folder / "metrics.jsonl")) == comparable(
        read_history(other / "metrics.jsonl")
    )
    for engine, file in product(engines, ("weights.safetensors", "optimizer.safetensors")):
        ours, theirs = (
            load_file(path / "checkpoints" / f"step_{ITERATIONS:06d}" / engine / file)
            for path in (folder, other)
        )
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_critic_reference_and_rollouts_drawn_ahead_outlive_a_kill(place: Path):
    """PPO with both, one step off, the sampler's experts replayed; in the first iteration the critic learns alone."""
    settings = (
        "algorithm=ppo",
        "algorithm.objective.critic.warmup_iterations=1",
        "algorithm.pipeline=one_step_off",
        "algorithm.routing_replay=r3",
    )
    process = start(place, "run.name=ahead", *settings)
    output = finish(process, place)
    assert process.returncode == 0, output
    whole = run_folder(place, "ahead")
    history = read_history(whole / "metrics.jsonl")
    iterations = [history[step] for step in range(1, ITERATIONS + 1)]
    assert [metrics["staleness/max"] for metrics in iterations] == [0, 1, 1, 1]
    assert [metrics["version/weights"] for metrics in iterations] == [1, 1, 2, 3]
    assert all(0 <= metrics["gap/route_mismatch"] < 0.5 for metrics in iterations)
    assert ["policy/loss" in metrics for metrics in iterations] == [False, True, True, True]
    assert all("critic/loss" in metrics for metrics in iterations)
    assert history[1]["reward/kl_penalty"] == pytest.approx(0, abs=1e-6)  # the policy is the reference still
    assert history[4]["reward/kl_penalty"] != 0
    assert all(history[4][f"memory/{name}"] > 0 for name in ("critic", "reference"))

    process = start(place, "run.name=ahead_killed", *settings)
    kill_when(place, process, lambda: _recorded(place, "ahead_killed") >= 2)
    folder = run_folder(place, "ahead_killed")
    process = start(place, f"run.resume={folder}", "run.name=ahead_killed", *settings)
    output = finish(process, place)
    assert process.returncode == 0, output
    assert_equal_runs(folder, whole, ("learner", "critic"))


def _recorded(place: Path, name: str) -> int:
    metrics = place / name / "latest" / "metrics.jsonl"
    return max(read_history(metrics), default=-1) if metrics.exists() else -1


def test_a_sampler_under_another_specification_stops_before_the_first_rollout(place: Path):
    process = start(place, "run.name=mismatch", "+spec.sampler.weight.outer_domain=expert")
    output = finish(process, place)
    assert process.returncode == 2, output
    assert "weight.outer_domain" in output
    assert "Traceback" not in output
    assert (run_folder(place, "mismatch") / "metrics.jsonl").read_text() == ""


def test_a_run_that_solves_everything_ends_well_and_keeps_what_it_learned(place: Path):
    process = start(place, "run.name=solved", "reward.function=tests.rl.custom_rewards:always_right")
    output = finish(process, place)
    assert process.returncode == 0, output
    assert "every problem drawn is solved: the run ends after iteration 0" in output
    folder = run_folder(place, "solved")
    assert CheckpointStore(folder / "checkpoints", 2).steps() == [0]
    assert (folder / "report.html").exists()


def test_a_finished_run_is_not_resumed(place: Path, uninterrupted: Path):
    process = start(place, "run.name=uninterrupted", f"run.resume={uninterrupted}")
    assert "has finished 4 iterations already" in finish(process, place)
    assert process.returncode == 2


def test_a_resumed_run_keeps_its_settings(place: Path, uninterrupted: Path):
    process = start(place, "run.name=uninterrupted", f"run.resume={uninterrupted}", "learner.lr=1e-5")
    assert "a resumed run cannot change learner.lr (0.0001 -> 1e-05)" in finish(process, place)
    assert process.returncode == 2

"""The main job with the real engines: what a run leaves, and that a killed one goes on as if nothing had been."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import rl.run_folder as run_folder_module
from kernels.catalogue import named_spec
from rl.records.history import read_history
from rl.train import main
from tests.rl.in_process import engines_in_process
from tests.rl.smallest_job import (
    ITERATIONS,
    arguments,
    assert_equal_runs,
    finish,
    kill_sampler_in_sync,
    kill_when,
    recorded,
    run_folder,
    start,
)

pytestmark = pytest.mark.slow

WARM = "model.warm_start.steps=40"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@dataclass(frozen=True)
class Finished:
    """A run's folder, and what its last launch printed."""

    folder: Path
    output: str


@pytest.fixture(scope="module")
def run(place: Path) -> Finished:
    """Killed while the checkpoint of a step was written that was recorded already, and gone on with; then its only
    sampler died in a weight sync.
    """

    def saving() -> bool:
        return any((place / "killed/latest/checkpoints").glob(".scratch-*"))

    process = start(place, WARM, "run.name=killed")
    kill_when(place, process, lambda: saving() and recorded(place, "killed") >= 1)
    folder = run_folder(place, "killed")
    process = start(place, f"run.resume={folder}", "run.name=killed", WARM)
    kill_sampler_in_sync(process, place)
    return Finished(folder, finish(process, place))


def test_both_engines_ran_the_experts_under_one_specification(run: Finished):
    engines = {
        entry["engine"]: entry for entry in json.loads((run.folder / "run.json").read_text())["engines"]
    }
    assert set(engines) == {"megatron", "vllm", "weight_sync"}
    assert len({entry["fingerprint"] for entry in engines.values()}) == 1
    assert engines["megatron"]["expert_calls"] > 0
    assert engines["vllm"]["expert_calls"] > 0
    log = (run.folder / "run.log").read_text()
    lines = [line for line in log.splitlines() if "execution specification" in line]
    assert len(lines) == 2  # of each launch
    layers = f"minite {named_spec('minite').fingerprint} in layers 0 to 1"
    for line in lines:
        assert "megatron, vllm, weight_sync" in line
        assert line.endswith(f"{layers}; precision map {engines['vllm']['fingerprint']}")


def test_what_a_run_leaves_is_what_the_run_folder_describes(run: Finished):
    left = {path.name for path in run.folder.iterdir()}
    assert {"learner.log", "sampler.log", "weight_sync.log", "run.log", "report.html"} <= left
    assert not {name for name in left if name not in (run_folder_module.__doc__ or "")}
    assert {path.stat().st_mode & 0o777 for path in run.folder.glob("*.log")} == {0o644}


def test_every_step_is_recorded_and_finite(run: Finished):
    history = read_history(run.folder / "metrics.jsonl")
    assert list(history) == list(range(ITERATIONS + 1))
    assert all(math.isfinite(value) for metrics in history.values() for value in metrics.values())
    assert [step for step, metrics in history.items() if "held_out/reward" in metrics] == [0, 2, 4]
    for step in range(1, ITERATIONS + 1):
        assert history[step]["version/weights"] == step
        assert history[step]["groups/kept"] >= 2
        assert history[step]["gap/p99"] < 0.05  # aligned engines: nats, far below the clip bounds
        assert history[step]["policy/grad_norm"] > 0
    assert (run.folder / "report.html").stat().st_size > 100_000


def test_a_run_fits_into_eight_gib(run: Finished):
    last = read_history(run.folder / "metrics.jsonl")[ITERATIONS]
    assert sum(value for name, value in last.items() if name.startswith("memory/")) < 8 * 1024


def test_a_run_killed_in_a_checkpoint_that_then_loses_its_sampler_equals_the_uninterrupted_one(
    place: Path, run: Finished
):
    """The other one has its engines in this process."""
    assert f"report: {run.folder}/report.html" in run.output
    output = " ".join(run.output.split())
    assert re.search(r"sampler 0 \(process \d+\) died in the weight sync of version \d; its log: ", output)
    assert "Worker exit" not in output  # Ray's account
    assert read_history(run.folder / "metrics.jsonl")[ITERATIONS]["usage/restarts"] == 1

    with engines_in_process():
        assert main(arguments(place, WARM, "run.name=uninterrupted")) == 0
    assert_equal_runs(run.folder, run_folder(place, "uninterrupted"))


def refused(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(overrides) == 2
    return capsys.readouterr().err


def test_a_finished_run_is_not_resumed(place: Path, run: Finished, capsys: pytest.CaptureFixture[str]):
    overrides = arguments(place, WARM, "run.name=killed", f"run.resume={run.folder}")
    assert "has finished 4 iterations already" in refused(overrides, capsys)


def test_a_resumed_run_keeps_its_settings(place: Path, run: Finished, capsys: pytest.CaptureFixture[str]):
    overrides = arguments(place, WARM, "run.name=killed", f"run.resume={run.folder}", "learner.lr=1e-5")
    expected = "a resumed run cannot change learner.lr (0.0001 -> 1e-05)"
    assert expected in refused(overrides, capsys)

"""The main job with the real engines, all in this process: another specification, nothing left to learn, and under the
strict spec no gap, also where responses are written in parts, by the weights of several iterations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl.checkpoint import CheckpointStore
from rl.records.history import read_history
from rl.rollout_store import load_backlog
from rl.train import main
from tests.rl.in_process import engines_in_process
from tests.rl.rollouts import group
from tests.rl.smallest_job import ITERATIONS, arguments, run_folder

pytestmark = pytest.mark.slow

COLD = "model.warm_start.steps=0"  # what the policy knows does not matter
PARTS = (
    "spec=strict",
    COLD,
    "reward.function=tests.rl.custom_rewards:even_length",
    "algorithm.partial_rollouts.token_budget=3",
    "algorithm.group_size=3",
    "algorithm.prompts_per_round=20",
    "algorithm.max_staleness=5",
)


@pytest.fixture(scope="module", autouse=True)
def engines_here() -> Iterator[None]:
    with engines_in_process():
        yield


def test_a_sampler_under_another_specification_stops_before_the_first_rollout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    other = "+spec.sampler.weight.outer_domain=expert"
    assert main(arguments(tmp_path, COLD, "run.name=mismatch", other)) == 2
    output = "".join(capfd.readouterr())
    assert "weight.outer_domain" in output
    assert "Traceback" not in output
    assert (run_folder(tmp_path, "mismatch") / "metrics.jsonl").read_text() == ""


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of a run under the strict spec that solves everything, but not from the start."""
    place = tmp_path_factory.mktemp("solved")
    settings = (
        "spec=strict",
        "reward.function=tests.rl.custom_rewards:solved_after_300",
        "algorithm.max_rounds=2",
        "run.iterations=9",
        "run.keep_checkpoints=9",
    )
    with redirect_stdout(StringIO()) as output:
        assert main(arguments(place, COLD, "run.name=solved", *settings)) == 0
    return run_folder(place, "solved"), output.getvalue()


def test_a_run_that_solves_everything_ends_well_and_keeps_what_it_learned(solved: tuple[Path, str]):
    folder, output = solved
    history = read_history(folder / "metrics.jsonl")
    last = max(history)
    assert 3 <= last < 9
    assert f"every problem drawn is solved: the run ends after iteration {last}" in output
    assert history[last]["held_out/reward"] == 1.0 > history[0]["held_out/reward"]
    assert CheckpointStore(folder / "checkpoints", 9).steps() == list(range(1, last + 1))
    assert (folder / "report.html").exists()


def test_under_the_strict_spec_there_is_no_gap_after_any_sync(solved: tuple[Path, str]):
    """Nor between the learner's scores and its first mini-batch, while its weights change from sync to sync."""
    folder, _ = solved
    [spec] = json.loads((folder / "run.json").read_text())["specs"]
    assert (spec["name"], spec["engines"]) == ("strict", ["megatron", "vllm", "weight_sync"])
    history = read_history(folder / "metrics.jsonl")
    for step in range(1, max(history) + 1):
        metrics = history[step]
        assert metrics["version/weights"] == step
        assert metrics["tokens/trained"] > 100
        assert metrics["gap/max"] == metrics["policy/log_ratio_abs"] == 0.0
        assert metrics["policy/approx_kl"] > 0  # in the second mini-batch, which the first has changed
    paths = sorted((folder / "checkpoints").glob("step_*/learner/weights.safetensors"))
    assert len(paths) == max(history)
    for before, after in pairwise(load_file(path) for path in paths):
        assert any(not tensor.equal(before[name]) for name, tensor in after.items())


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

"""The command ``python -m rl.evaluate``: wrong input in one line, and one evaluation with the real engine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.compose import compose_defaults
from rl.evaluate import main
from rl.evaluation.config import EvaluateConfig
from rl.evaluation.samples import Sample
from rl.evaluation.session import make_plan
from tests.rl.in_process import engines_in_process
from tests.rl.tiny_chat import make_data, make_model, make_run

WRONG = {
    "no checkpoint": ([], "checkpoint"),
    "unknown key": (["checkpoint=x", "sampels=3"], "sampels"),
    "unknown benchmark": (["checkpoint=x", "benchmarks=[aime26]"], "benchmarks='aime26'"),
    "no benchmark": (["checkpoint=x", "benchmarks=[]"], "benchmarks=[]"),
    "a benchmark twice": (["checkpoint=x", "benchmarks=[gsm8k,gsm8k]"], "each name once"),
    "unknown spec": (["checkpoint=x", "specs=[fp3]"], "specs='fp3'"),
    "no samples": (["checkpoint=x", "protocol.aime24.samples=0"], "protocol.aime24.samples=0"),
    "greedy samples": (["checkpoint=x", "temperature=0"], "protocol.aime24.samples=6"),
    "wrong type": (["checkpoint=x", "temperature=hot"], "temperature='hot'"),
    "top-p": (["checkpoint=x", "protocol.gsm8k.top_p=2"], "protocol.gsm8k"),
    "template": (["checkpoint=x", "protocol.gsm8k.template=Why?"], "protocol.gsm8k.template='Why?'"),
    "parser": (["checkpoint=x", "protocol.gsm8k.parser=guess"], "protocol.gsm8k.parser='guess'"),
    "nothing there": (["checkpoint=/nowhere"], "checkpoint='/nowhere'"),
    "plain model as trained": (["checkpoint={model}"], "specs=trained"),
    "a dense model": (["checkpoint={dense}", "specs=[bf16]"], "llama"),
    "no data": (["checkpoint={model}", "specs=[bf16]", "data_dir=/nowhere"], "/nowhere/gsm8k_test.jsonl"),
    "no room": (["checkpoint={model}", "specs=[bf16]", "max_tokens=1000"], "protocol.gsm8k.max_tokens=1000"),
    "cache": (["checkpoint={model}", "specs=[bf16]", "sampler.kv_cache_gib=0.00001"], "kv_cache_gib"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("evaluate")
    make_model(place / "model")
    make_data(place / "data")
    dense = place / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    return place


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.mark.parametrize("overrides, named", WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_refused_before_anything_starts(
    overrides: list[str], named: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import ray

    filled = [item.format(model=place / "model", dense=place / "dense") for item in overrides]
    defaults = [f"output_dir={tmp_path / 'outputs'}", f"data_dir={place / 'data'}"]
    if not any(item.startswith("benchmarks") for item in filled) and any("/" in item for item in filled):
        defaults += ["benchmarks=[gsm8k]", "samples=1", "max_tokens=8"]  # what comes later counts
    assert main([*defaults, *filled]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert named in error
    assert error.count("\n") == 1
    assert not (tmp_path / "outputs").exists()
    assert not ray.is_initialized()


def test_show_config_prints_every_protocol_and_starts_nothing(capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint=x", "protocol.aime24.samples=32", "--show-config"]) == 0
    shown = capsys.readouterr().out
    assert "samples: 32" in shown
    assert "ifeval:" in shown


def keys(place: Path, *more: str) -> list[str]:
    values = {
        "checkpoint": place / "run",
        "data_dir": place / "data",
        "output_dir": place / "outputs",
        "benchmarks": "[gsm8k,math500]",
        "problems": 2,
        "samples": 2,
        "max_tokens": 12,
        "save_every": 3,
        "object_store_mib": 80,
        "sampler.threads": 1,
    }
    return [*(f"{key}={value}" for key, value in values.items()), *more]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def killed(place: Path) -> Path:
    """The samples of math500 under bf16 as an evaluation left them that was killed: one, and half of another."""
    make_run(place / "run", place / "model")
    plan = make_plan(compose_defaults("evaluate", EvaluateConfig, keys(place)))
    [exam] = [exam for exam in plan.exams if exam.name == "math500"]
    prompt = exam.prompts[0]
    sample = Sample(prompt.problem.id, prompt.position, 0, 7, "from before", 3, "stop", correct=True)
    file = plan.folder / plan.samples_name(exam, "bf16")
    file.parent.mkdir(parents=True)
    file.write_text(sample.line() + sample.line()[:-9])
    return file


@pytest.mark.slow
def test_a_run_is_evaluated_under_the_spec_that_trained_it_and_under_bf16(
    place: Path, killed: Path, capsys: pytest.CaptureFixture[str]
):
    """In a launch with processes of its own part of it, in another, with the engines in this process, the rest."""
    part = ("specs=[bf16]", "benchmarks=[math500]", "logging.wandb=offline")
    command = [sys.executable, "-m", "rl.evaluate", *keys(place, *part)]
    environment = os.environ | {"HF_HOME": str(place / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = (place / "outputs" / "evaluate").iterdir()
    assert f"results: {folder}/results.json" in done.stdout
    assert "cut short" in done.stderr
    [first] = json.loads((folder / "results.json").read_text())["results"]
    assert any((folder / "wandb").glob("offline-run-*"))

    with engines_in_process():
        assert main(keys(place)) == 0
    assert capsys.readouterr().out.count("starting vLLM under") == 2
    results = json.loads((folder / "results.json").read_text())
    assert results["results"][-1] == first
    _check_results(results, folder)
    _check_samples(results, folder)
    _check_records(results, folder)
    assert [row["response"] == "from before" for row in lines(killed)] == [True, False, False, False]

    # All samples are there: no engine starts, and the results are the same.
    assert main(keys(place)) == 0
    assert "starting vLLM" not in capsys.readouterr().out
    again = json.loads((folder / "results.json").read_text())
    assert (again["results"], again["differences"]) == (results["results"], results["differences"])


def _check_results(results: dict, folder: Path) -> None:
    assert results["complete"]
    assert (results["checkpoint"]["step"], len(results["checkpoint"]["fingerprint"])) == (2, 64)
    assert {name: spec["layers"] for name, spec in results["specs"].items()} == {
        "trained": {"minite": 2},
        "bf16": {"bf16": 2},
    }
    assert "torch" in results["software"]["versions"]
    for name, parser in (("gsm8k", "gsm8k"), ("math500", "boxed")):
        described = results["benchmarks"][name]
        protocol = described["protocol"]
        assert (protocol["samples"], protocol["max_tokens"], protocol["parser"]) == (2, 12, parser)
        assert (protocol["temperature"], protocol["top_p"]) == (1.0, 0.7)
        assert all(described["data"][key] for key in ("source", "fingerprint", "asked"))
        assert described["template_hash"]
    pairs = [(result["benchmark"], result["spec"]) for result in results["results"]]
    assert pairs == [(name, spec) for name in ("gsm8k", "math500") for spec in ("trained", "bf16")]
    for result in results["results"]:
        assert (result["problems"], result["samples"], result["errors"]) == (2, 2, 0)
        assert result["metrics"].keys() == {"avg", "pass@2"}
        rows = lines(folder / result["samples_file"])
        share = sum(row["correct"] for row in rows) / 4
        assert math.isclose(result["metrics"]["avg"]["value"], share)
    assert [(d["benchmark"], d["first"], d["second"]) for d in results["differences"]] == [
        ("gsm8k", "trained", "bf16"),
        ("math500", "trained", "bf16"),
    ]


def _check_samples(results: dict, folder: Path) -> None:
    files = {(r["benchmark"], r["spec"]): lines(folder / r["samples_file"]) for r in results["results"]}
    for rows in files.values():
        assert len({row["seed"] for row in rows}) == 4
        assert len({row["response"] for row in rows}) > 1
        assert all(1 <= row["tokens"] <= 12 for row in rows)
    first, second = ([row["seed"] for row in files["gsm8k", spec]] for spec in ("trained", "bf16"))
    assert first == second  # the same draws under both specs


def _check_records(results: dict, folder: Path) -> None:
    engines = json.loads((folder / "run.json").read_text())["engines"]
    assert {engine["fingerprint"] for engine in engines} == {
        spec["fingerprint"] for spec in results["specs"].values()
    }
    assert all(engine["expert_calls"] > 0 for engine in engines)
    metrics: dict = {}
    for row in lines(folder / "metrics.jsonl"):
        assert row.pop("step") == 2
        metrics |= row
    assert metrics["benchmark/gsm8k/trained/score"] == results["results"][0]["metrics"]["avg"]["value"]
    assert "benchmark/math500/bf16/difference_low" in metrics

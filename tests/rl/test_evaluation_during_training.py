"""Benchmarks in the midst of a run: what is refused before it starts, and what is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.compose import load_config
from rl.config import Config
from rl.errors import ConfigError
from rl.evaluation.during_training import benchmark_metrics, benchmark_texts, training_exams
from rl.metrics import numbers
from rl.task import problem_source
from sampler.engine import Completion
from tests.rl.tiny_chat import ROWS, byte_tokenizer, make_data

TOKENIZER = byte_tokenizer()


def config(tmp_path: Path, *overrides: str) -> Config:
    data = make_data(tmp_path / "data")
    return load_config(
        ["+recipe=tiny", "sampler.max_model_len=400", f"evaluation.data_dir={data}", *overrides]
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "overrides, named",
    [
        (["evaluation.benchmarks=[aime26]"], "evaluation.benchmarks='aime26'"),
        (["evaluation.problems=0"], "evaluation.problems=0"),
        (["evaluation.benchmarks_every=0"], "evaluation.benchmarks_every=0"),
        (["+evaluation.protocol.aime26.samples=2"], "evaluation.protocol='aime26'"),
        (["evaluation.benchmarks=[math500]"], "evaluation.protocol.math500.max_tokens=8192"),
        (["evaluation.benchmarks=[math500]", "+evaluation.protocol.math500.samples=0"], "samples=0"),
        (["evaluation.benchmarks=[math500]", "+evaluation.protocol.math500.colour=red"], "colour"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], named: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=named.replace("[", r"\[")):
        training_exams(config(tmp_path, *overrides), TOKENIZER)


def test_the_sampler_of_the_run_answers_and_the_scores_are_recorded_by_name(tmp_path: Path):
    settings = config(
        tmp_path,
        "evaluation.benchmarks=[math500,aime24]",
        "+evaluation.protocol.math500={max_tokens:16,samples:2}",
        "+evaluation.protocol.aime24={max_tokens:16,samples:2}",
    )
    exams = training_exams(settings, TOKENIZER)
    right = {row["problem"]: row["answer"] for name in ("math500", "aime24") for row in ROWS[f"{name}.jsonl"]}

    def generate(prompts, seeds, sampling):
        assert sampling.max_tokens == 16
        answers = []
        for prompt, own in zip(prompts, seeds, strict=True):
            [answer] = [gold for problem, gold in right.items() if problem in TOKENIZER.decode(prompt)]
            texts = [rf"\boxed{{{answer}}}", f"Answer: {answer}"]  # each is right for one of the two
            ids = [tuple(TOKENIZER(text)["input_ids"]) for text in texts]
            answers.append(
                [
                    Completion(ids[k], (0.0,) * len(ids[k]), "stop", (0,) * len(ids[k]))
                    for k in range(len(own))
                ]
            )
        return answers

    metrics = benchmark_metrics(exams, generate, seed=0, workers=1, timeout_s=30)
    assert numbers(metrics) == metrics
    assert json.loads(json.dumps(metrics)) == metrics
    for name in ("math500", "aime24"):
        assert metrics[f"benchmark/{name}/trained/score"] == 0.5
        assert metrics[f"benchmark/{name}/trained/error_rate"] == 0


def test_training_problems_of_the_benchmarks_asked_are_reported_and_dropped(tmp_path: Path):
    shared = ROWS["math500.jsonl"][0]
    rows = [
        {"id": "0", "problem": shared["problem"], "answer": "1"},
        {"id": "1", "problem": "2 + 2?", "answer": "4"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        "data=file",
        f"data.path={tmp_path / 'rows.jsonl'}",
        "data.held_out=0",
        "evaluation.benchmarks=[math500]",
    ]
    for overlap, left in (("report", 2), ("drop", 1)):
        settings = config(tmp_path, *overrides, f"data.overlap={overlap}")
        about = problem_source(settings.data, 0, benchmark_texts(settings.evaluation)).describe()
        assert (about["in_math500"], about["training"]) == (1, left)


def test_without_benchmarks_nothing_is_read_and_nothing_recorded(tmp_path: Path):
    exams = training_exams(config(tmp_path, "evaluation.data_dir=/nowhere"), TOKENIZER)
    assert exams == ()
    assert benchmark_metrics(exams, None, seed=0, workers=1, timeout_s=1) == {}  # type: ignore[arg-type]

"""The result file, its metrics and the table on the terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from rl.evaluation.benchmarks import BENCHMARKS
from rl.evaluation.candidate import Candidate
from rl.evaluation.exams import Exam, make_exam
from rl.evaluation.results import (
    Result,
    compare,
    in_order,
    metrics_of,
    metrics_of_difference,
    write_results,
)
from rl.evaluation.samples import Sample
from rl.evaluation.summary import Bootstrap, summarise
from rl.evaluation.view import open_console, progress, results_table
from rl.metrics import numbers
from tests.rl.tiny_chat import byte_tokenizer, make_data

QUICK = Bootstrap(resamples=100)
MAPS = {
    "trained": PrecisionMap.resolve(3, named_spec("minite"), last_layers_bf16=1),
    "bf16": PrecisionMap.resolve(3, named_spec("bf16")),
}


@pytest.fixture
def exams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Exam]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = str(make_data(tmp_path / "data"))
    return [
        make_exam(name, BENCHMARKS[name].protocol, byte_tokenizer(), 10**6, data_dir=data)
        for name in ("gsm8k", "math500")
    ]


def result(exam: Exam, spec: str, *outcomes: str) -> Result:
    samples = [
        Sample(f"p{place}", place, k, 0, "", 5, "stop", mark == "1", "died" if mark == "?" else None)
        for place, own in enumerate(outcomes)
        for k, mark in enumerate(own)
    ]
    return Result(exam, spec, summarise(samples, QUICK), f"samples/{exam.name}.{spec}.jsonl")


@pytest.fixture
def results(exams: list[Exam]) -> list[Result]:
    """As they come: one spec after the other."""
    gsm8k, math500 = exams
    return [
        result(gsm8k, "trained", "1100", "0000"),
        result(math500, "trained", "1???"),
        result(gsm8k, "bf16", "1110", "1000"),
        result(math500, "bf16", "????"),
    ]


def test_results_are_ordered_and_compared_with_the_first_spec(results: list[Result]):
    ordered = in_order(results)
    assert [(r.exam.name, r.spec) for r in ordered] == [
        ("gsm8k", "trained"),
        ("gsm8k", "bf16"),
        ("math500", "trained"),
        ("math500", "bf16"),
    ]
    gsm8k, math500 = compare(ordered, QUICK)
    assert (gsm8k.first, gsm8k.second) == ("trained", "bf16")
    assert gsm8k.score and gsm8k.score.value == pytest.approx(0.25 - 0.5)
    assert math500.score is None  # nothing was judged on one side


def test_the_file_holds_all_that_a_score_depends_on(results: list[Result], exams: list[Exam], tmp_path: Path):
    candidate = Candidate("run/time/step_000012", Path("/r"), Path("/m"), "f" * 64, 12, None, tmp_path)
    path = write_results(tmp_path, candidate, exams, MAPS, results[:3], QUICK, seed=5)
    assert not json.loads(path.read_text())["complete"]
    path = write_results(tmp_path, candidate, exams, MAPS, in_order(results), QUICK, seed=5)
    written = json.loads(path.read_text())
    assert written["complete"]
    assert written["checkpoint"]["fingerprint"] == "f" * 64
    assert written["bootstrap"] == {"resamples": 100, "confidence": 0.95, "seed": 0}
    assert written["specs"]["trained"] == {
        "fingerprint": MAPS["trained"].fingerprint,
        "layers": {"minite": 2, "bf16": 1},
    }
    described = written["benchmarks"]["gsm8k"]
    assert described["template_hash"] == exams[0].template_hash
    assert described["data"]["fingerprint"] == exams[0].data["fingerprint"]
    assert {"temperature", "top_p", "max_tokens", "samples", "template", "parser", "reward"} <= described[
        "protocol"
    ].keys()
    first = written["results"][0]
    assert first["metrics"]["avg"]["value"] == 0.25
    assert first["metrics"].keys() == {"avg", "pass@2", "pass@4"}
    assert (written["results"][2]["errors"], written["results"][3]["metrics"]) == (3, {})


def test_metrics_are_in_the_table_and_no_result_is_no_number(results: list[Result]):
    """Symptom: numbers that JSON cannot hold; NaN where nothing was judged."""
    for one in results:
        metrics = metrics_of(one)
        assert numbers(metrics) == metrics
        json.dumps(metrics, allow_nan=False)
    assert metrics_of(results[0])["benchmark/gsm8k/trained/score"] == 0.25
    assert metrics_of(results[1])["benchmark/math500/trained/error_rate"] == 0.75
    assert "benchmark/math500/bf16/score" not in metrics_of(results[3])
    gsm8k, math500 = compare(in_order(results), QUICK)
    assert metrics_of_difference(gsm8k)["benchmark/gsm8k/bf16/difference"] == pytest.approx(-0.25)
    assert metrics_of_difference(math500) == {}


def test_the_table_has_a_row_for_each_benchmark_and_spec(results: list[Result]):
    ordered = in_order(results)
    console = Console(file=StringIO(), width=150, markup=False)
    console.print(results_table("a [b] c", ordered, compare(ordered, QUICK)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a [b] c" in text
    rows = [line for line in text.splitlines() if "trained" in line or "bf16" in line]
    assert len(rows) == 4
    assert "avg@4" in rows[0] and "25.0 [0.0, 50.0]" in rows[0] and "pass@4 50.0" in rows[0]
    assert "-25.0 [-" in rows[1]
    assert " - " in rows[3]


def test_progress_is_a_line_at_begin_and_end_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
):
    with progress(open_console(), "gsm8k under bf16", 8) as advance:
        advance(3)
        advance(8)
    assert capsys.readouterr().out.splitlines() == [
        "gsm8k under bf16: 8 samples",
        "gsm8k under bf16: 8 of 8 done",
    ]


def test_ifevals_metric_is_the_strict_share_of_prompts(exams: list[Exam]):
    exam = replace(exams[0], benchmark=BENCHMARKS["ifeval"])
    samples = [
        Sample("p", n, 0, 0, "", 1, "stop", False, None, {"instructions": 2, "strict": n, "loose": 2})
        for n in (1, 2)
    ]
    found = Result(exam, "bf16", summarise(samples, QUICK), "")
    assert found.score and found.score.value == 0.5

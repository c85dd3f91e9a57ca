"""Scores of the benchmarks against independent implementations on the same responses: lm-eval's GSM8K filters and its
IFEval scoring, and math-verify on the whole response.

With MINITE_DATA (the folder of the published files; NLTK_DATA for IFEval's) also on every real problem, and with
MINITE_EVALUATION (the folder of results.json) on the responses of an evaluation of these.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import math_verify
import pytest

from rl.evaluation.benchmarks import BENCHMARKS
from rl.evaluation.exams import Exam, make_exam
from rl.rewards.score import Score
from tests.rl.tiny_chat import ROWS, byte_tokenizer, make_data

TOKENIZER = byte_tokenizer()
REAL = os.environ.get("MINITE_DATA")
needs_real_data = pytest.mark.skipif(
    not REAL, reason="MINITE_DATA names no folder of published benchmark files"
)
EVALUATION = os.environ.get("MINITE_EVALUATION")
DRAWN = {"1122", "1129"}  # IFEval's keys for which lm-eval draws a letter at random


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of our own and, without the real one, NLTK's table of sentences in small."""
    place = tmp_path_factory.mktemp("scores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(place / "cache"))
        if not REAL:
            import nltk

            folder = place / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
            folder.mkdir(parents=True)
            for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab", "abbrev_types.txt"):
                (folder / name).write_text("")
            patch.setattr(nltk.data, "path", [str(place / "nltk_data")])
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_data(tmp_path_factory.mktemp("data")))


def real_rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(str(REAL)) / file).read_text().splitlines()]


def exam(name: str, data: str) -> Exam:
    return make_exam(name, BENCHMARKS[name].protocol, TOKENIZER, 10**6, data_dir=data)


def scores(made: Exam, response_to: dict[str, str]) -> dict[str, Score]:
    reward = made.reward()
    found = {p.problem.id: reward(response_to[p.problem.id], p.problem) for p in made.prompts}
    assert not {key: score.error for key, score in found.items() if score.error}
    return found


def directly(gold: str, response: str) -> bool:
    return bool(math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(response)))


def lm_eval_gsm8k(gold: str, response: str) -> bool:
    """lm-eval's strict match, with the settings of its gsm8k.yaml."""
    sys.modules.setdefault("sacrebleu", ModuleType("sacrebleu"))  # of another metric
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    [[found]] = RegexFilter(r"#### (\-?[0-9\.\,]+)").apply([[response]], [{}])
    ignored = [",", r"\$", "(?s).*#### ", r"\.$"]
    result = exact_match_hf_evaluate([found], [gold], regexes_to_ignore=ignored, ignore_case=True)
    return bool(result["exact_match"])


MATHS = {
    "aime24": [
        ("So it is.\nAnswer: 25", "Answer: 128"),
        ("Answer: $25$", "Answer: $2^7$"),
        ("Answer: 52", "Answer: 127"),
        (r"Answer: \boxed{25}", r"**Answer:** \boxed{-128}"),
    ],
    "aime25": [("Answer: 360",), (r"Answer: $360^\circ$",), ("Answer: 36",)],
    "math500": [
        (r"\boxed{\frac12}", r"\boxed{(0,\pi)}", r"\boxed{(x+1)(x-1)}"),
        (r"\boxed{0.5}", r"\boxed{(\pi, 0)}", r"\boxed{x^2-1}"),
        (r"\boxed{\dfrac{1}{2}}", r"\boxed{\left(0,\pi\right)}", r"\boxed{(x-1)(x-1)}"),
        (r"\boxed{2}", "no box", r"no: \boxed{1}, but \boxed{(x-1)(x+1)}"),
    ],
}


@pytest.mark.parametrize("name", MATHS)
def test_mathematics_is_judged_as_math_verify_judges_the_response(name: str, data: str):
    made = exam(name, data)
    gold = {row["id"]: row["answer"] for row in ROWS[f"{name}.jsonl"]}
    verdicts = set()
    for responses in MATHS[name]:
        response_to = dict(zip(gold, responses, strict=True))
        found = {key: score.correct for key, score in scores(made, response_to).items()}
        last = {key: text.rpartition("but ")[2] for key, text in response_to.items()}
        assert found == {key: directly(gold[key], last[key]) for key in gold}
        verdicts |= set(found.values())
    assert verdicts == {True, False}


GSM8K = [
    "#### 70,000",
    "70 * 1000 = <<70*1000=70000>>70000\n#### 70000",
    "#### -2",
    "#### -2.",
    "#### 2",
    "It is -2.",
]


@pytest.mark.parametrize("response", GSM8K)
def test_gsm8k_is_judged_as_by_lm_eval(response: str, data: str):
    found = scores(exam("gsm8k", data), {"g1": response, "g2": response})
    assert {key: score.correct for key, score in found.items()} == {
        "g1": lm_eval_gsm8k("70,000", response),
        "g2": lm_eval_gsm8k("-2", response),
    }


@pytest.mark.parametrize(
    "response, ours, theirs",
    [
        ("#### 1\nNo.\n#### -2", True, False),  # the last marker counts here, the first there
        ("####-2", True, False),  # there a space is needed
        ("#### -$2", True, False),  # there no currency may stand
        ("#### -2.00", True, False),  # numbers here, texts there
        ("#### -2/1", False, True),  # there the number ends where its characters end
    ],
)
def test_where_gsm8k_is_judged_otherwise_than_by_lm_eval(response: str, ours: bool, theirs: bool, data: str):
    assert scores(exam("gsm8k", data), {"g1": "", "g2": response})["g2"].correct is ours
    assert lm_eval_gsm8k("-2", response) is theirs


TEXTS = ["rain falls on the town", "Rain falls. On us!", "Sure:\nrain, *rain* and more rain", "rain", ""]


@pytest.mark.parametrize("response", TEXTS)
def test_ifeval_is_judged_as_by_lm_eval(response: str, data: str):
    _compare_with_lm_eval(data, {str(row["key"]): response for row in ROWS["ifeval.jsonl"]})


def _compare_with_lm_eval(folder: str, response_to: dict[str, str]) -> tuple[int, int]:
    """Prompt and instruction level, strict and loose; returns how many prompts were compared and how many passed."""
    from rl.rewards.ifeval_checkers import checkers

    rows = [json.loads(line) for line in (Path(folder) / "ifeval.jsonl").read_text().splitlines()]
    found = scores(exam("ifeval", folder), response_to)
    passed = 0
    for row in rows:
        key = str(row["key"])
        if key in DRAWN:
            continue
        expected = checkers().process_results(row, [response_to[key]])
        assert found[key].correct == expected["prompt_level_strict_acc"]
        assert found[key].details == {
            "instructions": len(row["instruction_id_list"]),
            "strict": sum(expected["inst_level_strict_acc"]),
            "loose": sum(expected["inst_level_loose_acc"]),
        }
        passed += found[key].correct
    return len(rows), passed


@needs_real_data
@pytest.mark.parametrize("name", ["aime24", "aime25", "math500"])
def test_real_mathematics(name: str):
    rows = real_rows(f"{name}.jsonl")
    gold = {row["id"]: row["answer"] for row in rows}
    others = dict(zip(gold, [*gold.values()][1:] + [*gold.values()][:1], strict=True))
    made = exam(name, str(REAL))
    form = "Answer: {}" if name.startswith("aime") else r"So it is $\boxed{{{}}}$."
    right = scores(made, {key: form.format(answer) for key, answer in gold.items()})
    assert all(score.correct for score in right.values())
    wrong = scores(made, {key: form.format(answer) for key, answer in others.items()})
    expected = {key: directly(gold[key], rf"\boxed{{{others[key]}}}") for key in gold}
    assert {key: score.correct for key, score in wrong.items()} == expected
    assert sum(expected.values()) < 0.05 * len(gold)


@needs_real_data
def test_real_gsm8k():
    rows = real_rows("gsm8k_test.jsonl")
    made = exam("gsm8k", str(REAL))
    shifted = [*rows[1:], rows[0]]
    right = scores(made, {row["id"]: row["solution"] for row in rows})
    assert len(right) == 1319 and all(score.correct for score in right.values())
    wrong = scores(made, {row["id"]: other["solution"] for row, other in zip(rows, shifted, strict=True)})
    for row, other in zip(rows, shifted, strict=True):
        assert wrong[row["id"]].correct == lm_eval_gsm8k(row["answer"], other["solution"])


@needs_real_data
def test_real_ifeval():
    rows = real_rows("ifeval.jsonl")
    texts = ["", "<<title>>\n\n* one\n* two\n* three\n\nP.S. it rains [place] [name]", "it rains " * 200]
    kinds = [lambda row: row["prompt"], lambda row: row["prompt"].lower().replace(",", "")]
    kinds += [lambda row, text=text: text for text in texts]
    response_to = {str(row["key"]): kinds[place % len(kinds)](row) for place, row in enumerate(rows)}
    compared, passed = _compare_with_lm_eval(str(REAL), response_to)
    assert compared == 541
    assert 20 < passed < 500


@needs_real_data
@pytest.mark.skipif(not EVALUATION, reason="MINITE_EVALUATION names no folder with results.json")
def test_the_responses_of_an_evaluation():
    """Every sample of results.json, judged again by the others."""
    from rl.rewards.ifeval_checkers import checkers

    folder = Path(str(EVALUATION))
    results = json.loads((folder / "results.json").read_text())
    judged = 0
    for result in results["results"]:
        name = result["benchmark"]
        rows = real_rows(BENCHMARKS[name].file.path)
        by_id = {str(row.get("id", row.get("key"))): row for row in rows}
        for line in (folder / result["samples_file"]).read_text().splitlines():
            sample = json.loads(line)
            row, text = by_id[sample["problem"]], sample["response"].rpartition("</think>")[2]
            if name == "ifeval":
                expected = checkers().process_results(row, [text])["prompt_level_strict_acc"]
            elif name == "gsm8k":
                expected = lm_eval_gsm8k(row["answer"], text)
            else:
                answer = re.findall(r"(?i)answer:(.*)" if name.startswith("aime") else r"\\boxed\{.*", text)
                expected = bool(answer) and directly(
                    row["answer"], answer[-1] if "boxed" in answer[-1] else rf"\boxed{{{answer[-1]}}}"
                )
            assert sample["correct"] == expected, sample
            judged += 1
    assert judged == sum(result["problems"] * result["samples"] for result in results["results"])

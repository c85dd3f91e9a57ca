from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rl.compose import CONFIG_DIR, load_config
from rl.data.files import FileProblems
from rl.data.problem import Message, Problem
from rl.data.rows import Statement
from rl.data.selection import comparable, distinct, in_language, overlap, unadorned
from rl.data.summary import summary
from rl.errors import DataError
from rl.task import problem_source

TRAPS = Path(__file__).parent / "data" / "dapo_traps.jsonl"
PRESET = yaml.safe_load((CONFIG_DIR / "data" / "dapo_math.yaml").read_text())
SETTINGS = {
    key: value for key, value in PRESET.items() if key not in ("defaults", "source", "path", "overlong")
}
MATH = {"math": ["If $3m+4n=25$ for positive integers $m$ and $n$, find the smallest value of $|m-n|$"]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def dapo(**settings) -> FileProblems:
    return FileProblems(str(TRAPS), **{**SETTINGS, "held_out": 0, **settings})


def ids(source: FileProblems) -> list[int]:
    problems = [source.training(position) for position in range(source.training_count)]
    return sorted(int(problem.id.removeprefix("uuid-")) for problem in problems)


def statement(text: str, answer: str = "1", identifier: str | None = None) -> Statement:
    return Statement(Problem(identifier or f"{text}/{answer}", text, answer, "test"), text, "row")


def test_rows_that_are_repeated_are_learned_from_once():
    source = dapo()
    assert ids(source) == [0, 1, 2, 6, 7, 8, 9, 10, 11]  # 3 says what 0 says; 4 and 5 contradict each other
    about = source.describe()
    assert (about["rows"], about["repeated_rows"], about["contradictory"]) == (36, 26, 1)
    assert about["rows"] - about["repeated_rows"] - about["contradictory"] == source.training_count


def test_problems_that_differ_in_typography_alone_are_one_if_asked_for():
    assert ids(dapo(repeated="drop_similar")) == [0, 1, 2, 6, 7, 8, 10, 11]


def test_the_published_prompt_is_asked_once_and_another_template_replaces_it():
    asked = {problem.id: problem for problem in map(dapo().training, range(9))}["uuid-0"]
    row = json.loads(TRAPS.read_text().splitlines()[0])
    assert asked.prompt == (Message("user", row["prompt"][0]["content"]),)
    assert asked.answer == "56"
    other = {problem.id: problem for problem in map(dapo(template="Q: {problem}").training, range(9))}[
        "uuid-0"
    ]
    assert other.prompt == (Message("user", r"Q: What is $7 \cdot 8$?"),)


@pytest.mark.parametrize(
    "language, expected",
    [("en", [0, 1, 2, 7, 8, 9, 10, 11]), ("zh", [6]), ("any", [0, 1, 2, 6, 7, 8, 9, 10, 11])],
)
def test_language(language, expected):
    source = dapo(language=language)
    assert ids(source) == expected
    assert source.describe()["other_language"] == 9 - len(expected)


def test_chinese_punctuation_alone_is_no_chinese_text():
    assert in_language("What is 3\uff0c4\uff1f", "en")
    assert not in_language("\u6c42 $x$", "en")


def test_overlap_with_a_benchmark_is_reported_and_dropped_on_request():
    reported = dapo(benchmarks={**MATH, "other": ["something else"]})
    assert 7 in ids(reported)
    counts = {key: reported.describe()[key] for key in ("in_math", "in_other", "dropped_as_benchmark")}
    assert counts == {"in_math": 1, "in_other": 0, "dropped_as_benchmark": 0}
    dropped = dapo(benchmarks=MATH, overlap="drop")
    assert ids(dropped) == [0, 1, 2, 6, 8, 9, 10, 11]
    assert dropped.describe()["dropped_as_benchmark"] == 1


def test_a_benchmark_named_in_the_configuration_is_read(tmp_path):
    benchmark = tmp_path / "math.jsonl"
    benchmark.write_text(json.dumps({"question": MATH["math"][0]}) + "\n")
    named = [f"+data.benchmarks.math.path={benchmark}", "+data.benchmarks.math.column=question"]
    config = load_config(
        [
            "+recipe=smollm2",
            "data=dapo_math",
            f"data.path={TRAPS}",
            *named,
            "data.overlap=drop",
            "data.held_out=0",
        ]
    )
    source = problem_source(config.data, seed=0)
    assert source.describe()["in_math"] == 1
    assert source.training_count == 8


def test_a_problem_held_out_is_not_learned_from_in_another_typography():
    apart = 0
    for seed in range(12):
        source = dapo(held_out=3, seed=seed)
        held_out = {int(problem.id.removeprefix("uuid-")) for problem in source.held_out}
        twins = {8, 9}  # one problem in two typographies
        apart += len(twins & held_out) == 1
        assert not (twins & held_out and twins & set(ids(source)))
    assert apart  # the case did arise


@pytest.mark.parametrize(
    "left, right",
    [
        (r"Find $\dfrac{1}{2}$.", r"find \(\frac12\)"),
        (r"$\left( x \right)$", "$(x)$"),
        ("A\u00a0word , here", "a word, here"),
        (r"$x\,dx$", "$x dx$"),
        ("\uff11\uff12", "12"),
    ],
)
def test_typography_makes_no_difference(left, right):
    assert unadorned(left) == unadorned(right)
    assert comparable(left) == comparable(right)


@pytest.mark.parametrize("left, right", [("3 + 4", "3 - 4"), ("x < 2", "x > 2"), ("2^3", "2*3"), ("-3", "3")])
def test_operators_tell_problems_apart_but_not_from_a_benchmark(left, right):
    assert unadorned(left) != unadorned(right)
    assert comparable(left) == comparable(right)


def test_contradictions_go_whatever_their_order_and_number():
    found = [
        statement("a", "1"),
        statement("b"),
        statement(" a ", "2"),
        statement("a", "1", "again"),
        statement("c"),
    ]
    result = distinct(found, "drop")
    assert [kept.text for kept in result.statements] == ["b", "c"]
    assert (result.rows, result.repeated_rows, result.contradictory) == (5, 2, 1)
    assert distinct(found[:2] + found[3:], "drop").contradictory == 0


def test_answers_that_differ_in_white_space_do_not_contradict():
    assert distinct([statement("a", "1"), statement("a", " 1")], "drop").contradictory == 0


def test_without_dropping_ids_are_unique_and_nothing_else_is_looked_at():
    found = [statement("a", "1"), statement("a", "2")]
    assert distinct(found, "error").statements == found
    with pytest.raises(DataError, match="row: id 'x' occurs a second time"):
        distinct([statement("a", "1", "x"), statement("a", "1", "x")], "error")


def test_a_text_without_letters_and_digits_overlaps_with_nothing():
    assert overlap([statement("?"), statement("12")], {"b": ["!", "1 2"]}) == {"b": {1}}


def test_nothing_left_to_train_on_says_by_which_rules():
    with pytest.raises(DataError, match=r"none of its 9 problems.*data\.language=zh.*1 held out"):
        dapo(language="zh", held_out=1)


def test_what_was_left_out_is_said_at_the_start():
    about = dapo(benchmarks=MATH, overlap="drop", language="en").describe()
    prompts = {"longest_prompt": 90, "prompt_limit": 96, "overlong_training": 2, "overlong_held_out": 0}
    lines = summary(about | prompts | {"fingerprint": "f00d"})
    assert lines == [
        f"data {TRAPS}: 36 rows, 5 problems to learn from, 0 held out; longest prompt 90 of 96 tokens;"
        " fingerprint f00d",
        "left out: 26 repeated, 1 with contradictory answers, 1 in another language, 1 that are a benchmark's,"
        " 2 over the prompt limit",
        "problems that stand in a benchmark: 1 of math (left out)",
    ]


def test_a_generated_data_set_has_a_line_too():
    about = {
        "source": "sums",
        "training": 9,
        "held_out": 1,
        "longest_prompt": 5,
        "prompt_limit": 8,
        "fingerprint": "f",
    }
    assert summary(about | {"overlong_training": 0, "overlong_held_out": 0}) == [
        "data sums: 9 problems to learn from, 1 held out; longest prompt 5 of 8 tokens; fingerprint f"
    ]

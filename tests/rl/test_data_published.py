"""The published data sets themselves, where MINITE_DATA names a folder with them; see tests/rl/data/README.md."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from rl.compose import CONFIG_DIR
from rl.data.files import FileProblems
from rl.data.tables import read_column

FOLDER = Path(os.environ.get("MINITE_DATA", "/nowhere"))

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="MINITE_DATA names no folder with the data sets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def preset(name: str) -> dict:
    own = yaml.safe_load((CONFIG_DIR / "data" / f"{name}.yaml").read_text())
    base = preset(own["defaults"][0]) if own["defaults"][0] in ("dapo_math",) else {}
    return base | {
        key: value for key, value in own.items() if key not in ("defaults", "source", "path", "overlong")
    }


def dapo(**settings) -> FileProblems:
    return FileProblems(str(FOLDER / "dapo_math_17k.jsonl"), **{**preset("dapo_math_rows"), **settings})


def test_dapo_math_17k_has_the_repeats_and_contradictions_that_are_known():
    exact: dict[str, set[str]] = {}
    for row in lines("dapo_math_17k.jsonl"):
        exact.setdefault(row["problem"], set()).add(row["answer"])
    assert (len(exact), sum(len(answers) > 1 for answers in exact.values())) == (17_290, 11)

    about = dapo(held_out=0).describe()
    spaced = {" ".join(text.split()): answers for text, answers in exact.items()}
    assert about["rows"] - about["repeated_rows"] == len(spaced) == 17_188
    assert (about["rows"], about["contradictory"], about["training"]) == (17_917, 12, 17_176)


def test_dapo_math_17k_without_typography():
    about = dapo(held_out=0, repeated="drop_similar").describe()
    assert (about["repeated_rows"], about["contradictory"], about["training"]) == (1_694, 26, 16_197)


def test_dapo_math_17k_in_chinese_and_english():
    chinese, other = (dapo(held_out=0, language=language) for language in ("zh", "en"))
    assert (
        sum(bool(re.search("[\u4e00-\u9fff]", row["problem"])) for row in lines("dapo_math_17k.jsonl"))
        == 3_432
    )
    assert chinese.training_count + other.training_count == 17_176
    assert chinese.describe()["other_language"] == other.training_count


def test_dapo_math_17k_overlaps_with_math_500_alone():
    names = ("aime24", "aime25", "math500", "gsm8k_test")
    benchmarks = {name: read_column(str(FOLDER / f"{name}.jsonl"), "test", "problem") for name in names}
    about = dapo(held_out=0, benchmarks=benchmarks, overlap="drop").describe()
    assert [about[f"in_{name}"] for name in names] == [0, 0, 9, 0]
    assert about["dropped_as_benchmark"] == 9


def test_published_columns_and_bare_rows_are_the_same_problems():
    published = FileProblems(str(FOLDER / "dapo_math_sample.jsonl"), **preset("dapo_math"), held_out=0)
    bare = {problem.prompt: problem.answer for problem in map(dapo(held_out=0).training, range(17_176))}
    assert published.training_count == 8
    assert published.describe()["repeated_rows"] == 2
    for problem in map(published.training, range(8)):
        assert bare[problem.prompt] == problem.answer


@pytest.mark.parametrize(
    "name, count", [("gsm8k_train", 7_473), ("math500", 500), ("aime24", 30), ("aime25", 30)]
)
def test_other_sets_are_read_in_full(name, count):
    assert FileProblems(str(FOLDER / f"{name}.jsonl"), held_out=0).training_count == count


def test_ifeval_is_read_in_full():
    source = FileProblems(str(FOLDER / "ifeval.jsonl"), **preset("ifeval"), held_out=0)
    own = {str(row["key"]): row for row in lines("ifeval.jsonl")}
    problems = [source.training(position) for position in range(source.training_count)]
    assert len(problems) == len(own) == 541
    for problem in problems:
        row = own[problem.id]
        assert json.loads(problem.answer) == {key: row[key] for key in ("instruction_id_list", "kwargs")}

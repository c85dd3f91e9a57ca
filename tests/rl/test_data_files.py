from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.data.files import FileProblems
from rl.data.problem import Message
from rl.errors import DataError

SAMPLE = Path(__file__).parent / "data" / "gsm8k_sample.jsonl"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(count: int, start: int = 0) -> list[dict]:
    return [
        {"id": f"p{i}", "problem": f"What is {i} + 1?", "answer": str(i + 1)}
        for i in range(start, start + count)
    ]


def everything(source: FileProblems) -> list:
    return [source.training(position) for position in range(source.training_count)]


def test_gsm8k_sample_is_split_and_read_in_full():
    source = FileProblems(str(SAMPLE), held_out=8, seed=1)
    originals = {row["id"]: row for row in map(json.loads, SAMPLE.read_text().splitlines())}
    problems = [*everything(source), *source.held_out]
    assert {problem.id for problem in problems} == originals.keys()
    for problem in problems:
        assert problem.prompt == (Message("user", originals[problem.id]["problem"]),)
        assert problem.answer == originals[problem.id]["answer"]
        assert problem.source == "gsm8k_sample"
    assert "850,000" in {problem.answer for problem in problems}
    assert len(source.held_out) == 8


def test_answer_after_a_marker_as_in_the_hubs_gsm8k():
    marked = FileProblems(str(SAMPLE), answer_column="solution", answer_marker="####", held_out=8)
    plain = FileProblems(str(SAMPLE), held_out=8)
    assert everything(marked) == everything(plain)
    assert marked.held_out == plain.held_out


def test_parquet_and_jsonl_give_the_same_problems(tmp_path):
    jsonl = write(tmp_path / "set.jsonl", rows(20))
    pq.write_table(pa.Table.from_pylist(rows(20)), tmp_path / "set.parquet")
    left, right = (FileProblems(path, held_out=4) for path in (jsonl, str(tmp_path / "set.parquet")))
    assert everything(left) == everything(right)
    assert left.describe()["content_hash"] == right.describe()["content_hash"]


def test_columns_template_and_plain_text(tmp_path):
    path = write(
        tmp_path / "set.jsonl", [{"q": "1+1 in {braces}", "a": 2, "n": 5}, {"q": "x", "a": 3, "n": 6}]
    )
    template = r"Q: {problem} Put the answer in \boxed{}."
    source = FileProblems(
        path,
        prompt_column="q",
        answer_column="a",
        id_column="n",
        template=template,
        chat=False,
        held_out=0,
    )
    problems = {problem.id: problem for problem in everything(source)}
    assert problems["5"].prompt == r"Q: 1+1 in {braces} Put the answer in \boxed{}."
    assert problems["5"].answer == "2"


def test_published_dapo_columns_with_chat_messages_and_repeats(tmp_path):
    def row(index: int) -> dict:
        return {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{index}"}],
            "reward_model": {"ground_truth": str(index), "style": "rule"},
            "extra_info": {"index": f"uuid-{index}"},
        }

    path = write(tmp_path / "dapo.jsonl", [row(index) for index in (0, 1, 2, 0, 1, 2, 0)])
    columns = {
        "prompt_column": "prompt",
        "answer_column": "reward_model.ground_truth",
        "id_column": "extra_info.index",
    }
    source = FileProblems(path, **columns, repeated="drop", held_out=0)
    problems = sorted(everything(source), key=lambda problem: problem.id)
    assert [problem.answer for problem in problems] == ["0", "1", "2"]
    assert problems[1].prompt == (Message("system", "s"), Message("user", "q1"))
    assert source.describe()["repeated_rows"] == 4
    with pytest.raises(DataError, match=r"row 3: id 'uuid-0' occurs a second time"):
        FileProblems(path, **columns, held_out=0)
    with pytest.raises(DataError, match="chat messages, to which"):
        FileProblems(path, **columns, repeated="drop", template="Q: {problem}")


def test_the_last_box_of_a_solution_is_the_answer(tmp_path):
    solution = r"First \boxed{1}, but no: \boxed{\frac{1}{2}}."
    path = write(tmp_path / "math.jsonl", [{"problem": "x", "solution": solution}])
    source = FileProblems(path, answer_column="solution", answer_parser="boxed", id_column=None, held_out=0)
    assert source.training(0).answer == r"\frac{1}{2}"


def test_several_answer_columns_make_json_that_is_the_same_from_parquet_and_jsonl(tmp_path):
    content = [
        {"key": 1, "prompt": "p", "names": ["a", "b"], "arguments": [{"n": 2}, {"word": "x"}]},
        {"key": 2, "prompt": "q", "names": ["c"], "arguments": [{}]},
    ]
    jsonl = write(tmp_path / "set.jsonl", content)
    pq.write_table(pa.Table.from_pylist(content), tmp_path / "set.parquet")  # fills absent keys with null
    columns = {"prompt_column": "prompt", "answer_column": ("names", "arguments"), "id_column": "key"}
    left, right = (
        FileProblems(path, **columns, held_out=0) for path in (jsonl, str(tmp_path / "set.parquet"))
    )
    assert everything(left) == everything(right)
    answers = {problem.id: json.loads(problem.answer) for problem in everything(left)}
    assert answers["1"] == {"names": ["a", "b"], "arguments": [{"n": 2}, {"word": "x"}]}
    assert answers["2"] == {"names": ["c"], "arguments": [{}]}


def test_row_number_stands_in_for_a_missing_id_column(tmp_path):
    path = write(tmp_path / "set.jsonl", rows(3))
    assert {p.id for p in everything(FileProblems(path, id_column=None, held_out=0))} == {"0", "1", "2"}


def test_held_out_share_depends_on_the_seed_alone(tmp_path):
    path = write(tmp_path / "set.jsonl", rows(40))
    first, again, other = (FileProblems(path, held_out=10, seed=seed) for seed in (1, 1, 2))
    assert first.held_out == again.held_out != other.held_out
    assert everything(first) == everything(again)
    assert not {p.id for p in first.held_out} & {p.id for p in everything(first)}
    # Positions go on through epochs, each in another order.
    second_epoch = [first.training(30 + offset) for offset in range(30)]
    assert second_epoch != everything(first)
    assert {p.id for p in second_epoch} == {p.id for p in everything(first)}


def test_held_out_file_and_what_both_contain(tmp_path):
    training = write(tmp_path / "train.jsonl", rows(20))
    test = write(tmp_path / "test.jsonl", [{**row, "id": "t" + row["id"]} for row in rows(6, start=17)])
    source = FileProblems(training, held_out_path=test, held_out=100)
    assert [p.id for p in source.held_out] == [f"tp{i}" for i in range(17, 23)]
    assert source.training_count == 17  # the three prompts that are also held out are left out
    assert source.describe()["also_held_out"] == 3
    assert len(FileProblems(training, held_out_path=test, held_out=4).held_out) == 4


def test_a_prompt_that_occurs_twice_is_not_both_trained_and_held_out(tmp_path):
    path = write(
        tmp_path / "set.jsonl", [{**row, "id": f"{copy}{row['id']}"} for copy in "ab" for row in rows(10)]
    )
    source = FileProblems(path, held_out=3)
    secret = {p.prompt for p in source.held_out}
    assert not secret & {p.prompt for p in everything(source)}
    assert source.describe()["also_held_out"] > 0


def test_content_hash_follows_the_content_and_not_the_order(tmp_path):
    path = write(tmp_path / "set.jsonl", rows(10))
    (tmp_path / "elsewhere").mkdir()
    moved = write(tmp_path / "elsewhere" / "set.jsonl", rows(10))
    changed = tmp_path / "changed" / "set.jsonl"
    changed.parent.mkdir()
    write(changed, [*rows(9), {"id": "p9", "problem": "What is 9 + 1?", "answer": "11"}])
    same = {
        FileProblems(p, held_out=0, seed=s).describe()["content_hash"] for p in (path, moved) for s in (1, 2)
    }
    assert len(same) == 1
    assert FileProblems(str(changed), held_out=0).describe()["content_hash"] not in same


@pytest.mark.parametrize(
    "content, settings, message",
    [
        ("", {}, "is empty"),
        ('{"id": 1, "problem": "x"', {}, "cannot be read"),
        (
            '{"id": 1, "question": "x", "answer": "1"}\n',
            {},
            r"no column 'problem'; it has id, question, answer",
        ),
        ('{"id": 1, "problem": "x", "answer": null}\n', {}, r"row 0 has no value in column 'answer'"),
        ('{"id": 1, "problem": " ", "answer": "1"}\n', {}, "column 'problem' must hold text"),
        ('{"id": 1, "problem": "x", "answer": ["1"]}\n', {}, "column 'answer' must hold text"),
        ('{"id": 1, "problem": ["x"], "answer": "1"}\n', {}, "not of chat messages"),
        ('{"id": 1, "problem": "x", "answer": "1"}\n', {"answer_marker": "####"}, "nothing follows '####'"),
        ('{"id": 1, "problem": "x", "answer": "1"}\n' * 2, {}, "id '1' occurs a second time"),
        (
            '{"id": 1, "problem": "x", "answer": "1"}\n{"id": 1, "problem": "x", "answer": "2"}\n',
            {"repeated": "drop"},
            "is left to train on",  # one problem with two answers
        ),
        (
            '{"id": 1, "problem": "x", "answer": "1"}\n{"id": 1, "problem": "y", "answer": "1"}\n',
            {"repeated": "drop"},
            "occurs a second time with another problem",
        ),
        ('{"id": 1, "problem": "x", "answer": "1"}\n', {"answer_parser": "bocks"}, "must be one of boxed"),
        (
            '{"id": 1, "problem": "x", "answer": "1"}\n',
            {"answer_parser": "boxed"},
            "row 0: boxed finds no answer",
        ),
        (
            '{"id": 1, "problem": "x", "answer": "1"}\n',
            {"answer_parser": "boxed", "answer_marker": "####"},
            "only one of",
        ),
        (
            '{"id": 1, "problem": "x", "answer": "1"}\n',
            {"unwrap": "Q: {problem}"},
            "row 0: .* not a problem wrapped",
        ),
        ('{"id": 1, "problem": "x", "answer": "1"}\n', {"held_out": 1}, "is left to train on"),
        ('{"id": 1, "problem": "x", "answer": "1"}\n', {"held_out": -1}, r"data\.held_out=-1"),
        (
            '{"id": 1, "problem": "x", "answer": "1"}\n',
            {"template": "no place"},
            r"data\.template='no place'",
        ),
        (
            '{"id": 1, "problem": "x", "answer": "1", "m": {"a": 1}}\n',
            {"answer_column": "m.b"},
            r"no value in column 'm\.b'",
        ),
    ],
)
def test_bad_files_are_refused_with_what_is_wrong(tmp_path, content, settings, message):
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        FileProblems(str(path), **{"held_out": 0, **settings})


def test_missing_files_and_names_of_no_data_set():
    with pytest.raises(DataError, match=r"'nowhere/set\.jsonl': no such file"):
        FileProblems("nowhere/set.jsonl")
    with pytest.raises(DataError, match="neither a file"):
        FileProblems("set")


def test_an_unreachable_hub_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"'nobody/nothing:main' cannot be read"):
        FileProblems("nobody/nothing:main")

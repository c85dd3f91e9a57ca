"""Benchmarks made ready for a model: what is read, what is asked, and what the fingerprints stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rl.errors import ConfigError, DataError
from rl.evaluation.benchmarks import BENCHMARKS
from rl.evaluation.exams import Exam, make_exam, read_problems
from tests.rl.tiny_chat import CHAT_TEMPLATE, ROWS, byte_tokenizer, make_data

TOKENIZER = byte_tokenizer()
MATHS = [name for name in BENCHMARKS if name != "ifeval"]  # the reward of ifeval needs packages of its own


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(make_data(tmp_path / "data"))


def exam(name: str, data: str, positions: int = 100_000, **changes) -> Exam:
    options = {key: changes.pop(key) for key in ("problems", "overlong") if key in changes}
    protocol = replace(BENCHMARKS[name].protocol, **changes)
    return make_exam(name, protocol, TOKENIZER, positions, data_dir=data, **options)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_reads_its_file_in_order(name: str, data: str):
    rows = ROWS[BENCHMARKS[name].file.path]
    problems, path = read_problems(BENCHMARKS[name], data)
    assert path == f"{data}/{BENCHMARKS[name].file.path}"
    assert [problem.id for problem in problems] == [str(row.get("id", row.get("key"))) for row in rows]
    assert [problem.prompt for problem in problems] == [row.get("problem", row.get("prompt")) for row in rows]


def test_the_instructions_of_ifeval_are_its_answer(data: str):
    problems, _ = read_problems(BENCHMARKS["ifeval"], data)
    for problem, row in zip(problems, ROWS["ifeval.jsonl"], strict=True):
        assert json.loads(problem.answer) == {key: row[key] for key in ("instruction_id_list", "kwargs")}


@pytest.mark.parametrize("name", MATHS)
def test_the_prompt_is_the_problem_in_the_template_in_the_chat_template(name: str, data: str):
    made = exam(name, data)
    for prompt, row in zip(made.prompts, ROWS[BENCHMARKS[name].file.path], strict=True):
        text = made.protocol.template.replace("{problem}", row["problem"])
        assert made.text(prompt.token_ids) == f"[user] {text}\n[assistant] "
        assert prompt.problem.answer == row["answer"]


def test_the_published_protocols_are_the_defaults():
    samples = {name: benchmark.protocol.samples for name, benchmark in BENCHMARKS.items()}
    assert samples == {"aime24": 6, "aime25": 6, "math500": 4, "gsm8k": 4, "ifeval": 1}
    assert BENCHMARKS["ifeval"].protocol.temperature == 0


def test_a_part_of_the_problems_is_always_the_same_and_more_hold_fewer(data: str):
    one, two = exam("math500", data, problems=1), exam("math500", data, problems=2)
    assert [len(part.prompts) for part in (one, two)] == [1, 2]
    assert set(one.prompts) < set(two.prompts) < set(exam("math500", data).prompts)
    assert [prompt.position for prompt in two.prompts] == sorted(prompt.position for prompt in two.prompts)


def test_fingerprints_stand_for_what_decides_a_sample_and_for_nothing_else(data: str, tmp_path: Path):
    plain = exam("math500", data)
    for same in (exam("math500", data, samples=9), exam("math500", data, problems=1)):
        assert same.fingerprint == plain.fingerprint
    for other in (
        exam("math500", data, temperature=0.5),
        exam("math500", data, top_p=0.9),
        exam("math500", data, max_tokens=7),
        exam("math500", data, parser="last_number"),
        exam("math500", data, template="Q: {problem}"),
        exam("math500", data, chat=False),
    ):
        assert other.fingerprint != plain.fingerprint
        assert other.data == plain.data
    assert exam("math500", data, template="Q: {problem}").template_hash != plain.template_hash
    assert exam("math500", data, chat=False).template_hash != plain.template_hash

    rows = [*ROWS["math500.jsonl"][:-1], ROWS["math500.jsonl"][-1] | {"answer": "other"}]
    changed = make_data(tmp_path / "changed")
    (changed / "math500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert exam("math500", str(changed)).fingerprint != plain.fingerprint
    assert exam("math500", str(changed)).data["fingerprint"] != plain.data["fingerprint"]


def test_prompts_without_room_are_refused_or_dropped_and_counted_never_cut(data: str):
    """Symptom: the tokenizer cuts long prompts."""
    lengths = [len(prompt.token_ids) for prompt in exam("gsm8k", data).prompts]
    limit = min(lengths) + 8
    with pytest.raises(ConfigError, match=rf"gsm8k.max_tokens=8.*{max(lengths)} tokens"):
        exam("gsm8k", data, positions=limit, max_tokens=8)
    kept = exam("gsm8k", data, positions=limit, max_tokens=8, overlong="drop")
    assert [len(prompt.token_ids) for prompt in kept.prompts] == [min(lengths)]
    assert (kept.data["overlong"], kept.data["problems"]) == (1, 2)
    with pytest.raises(ConfigError, match="max_tokens"):
        exam("gsm8k", data, positions=9, max_tokens=8, overlong="drop")


def test_text_that_brings_a_second_begin_token_is_refused(data: str):
    """Symptom: two begin-of-sequence tokens in evaluation."""
    twice = byte_tokenizer()
    twice.bos_token = "["
    twice.chat_template = "[" + CHAT_TEMPLATE
    with pytest.raises(DataError, match="two beginning-of-sequence"):
        make_exam("aime24", BENCHMARKS["aime24"].protocol, twice, 100_000, data_dir=data)


def test_what_cannot_work_is_refused(data: str, tmp_path: Path):
    protocol = BENCHMARKS["aime24"].protocol
    with pytest.raises(ConfigError, match=r"protocol\.aime24\.chat"):
        make_exam("aime24", protocol, byte_tokenizer(chat=False), 100_000, data_dir=data)
    with pytest.raises(ConfigError, match=r"protocol\.aime24"):
        make_exam("aime24", replace(protocol, parser=None), TOKENIZER, 100_000, data_dir=data)
    with pytest.raises(DataError, match="no such file"):
        make_exam("aime24", protocol, TOKENIZER, 100_000, data_dir=str(tmp_path / "nowhere"))
    repeated = make_data(tmp_path / "repeated")
    file = repeated / "aime24.jsonl"
    file.write_text(file.read_text() * 2)
    with pytest.raises(DataError, match="'a1' occurs a second time"):
        make_exam("aime24", protocol, TOKENIZER, 100_000, data_dir=str(repeated))

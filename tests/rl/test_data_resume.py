"""The data cursor: a run that goes on sees what it would have seen, and refuses other data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.data.files import FileProblems
from rl.data.prompts import Prompts
from rl.errors import DataError
from tests.rl.test_data_prompts import Lengths, word_tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(path: Path, words: list[str], answer: str = "1") -> str:
    rows = [{"id": number, "problem": f"{word} w1", "answer": answer} for number, word in enumerate(words)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(path: str, seed: int = 0, held_out: int = 2, template: str = "{problem}") -> Prompts:
    source = FileProblems(path, seed=seed, held_out=held_out, template=template, chat=False)
    return Prompts(source, word_tokenizer(), limit=8)


WORDS = [f"w{n}" for n in range(2, 12)]


def test_a_new_process_goes_on_where_the_cursor_stands(tmp_path):
    path = write(tmp_path / "set.jsonl", WORDS)
    first = prompts(path)
    whole = [first.training(position) for position in range(30)]
    mark = json.loads(json.dumps(first.bookmark(11)))
    again = prompts(path)
    again.check_bookmark(mark)
    assert [again.training(position) for position in range(mark["position"], 30)] == whole[11:]


@pytest.mark.parametrize("position, epoch", [(0, 0), (7, 0), (8, 1), (15, 1), (16, 2)])
def test_at_an_epochs_end_the_next_one_begins(tmp_path, position, epoch):
    source = prompts(write(tmp_path / "set.jsonl", WORDS))
    assert source.bookmark(position)["epoch"] == epoch
    start = epoch * 8
    drawn = [source.training(start + offset).problem.id for offset in range(8)]
    assert len(set(drawn)) == 8
    if epoch:
        assert drawn != [source.training(offset).problem.id for offset in range(8)]


def test_epochs_are_counted_in_prompts_that_fit():
    source = Prompts(Lengths(10), word_tokenizer(), limit=5, overlong="drop")
    assert source.training_count == 4
    assert source.bookmark(9)["epoch"] == 2


def test_the_fingerprint_is_that_of_the_data_and_not_of_its_place(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    here, there = (write(folder / "set.jsonl", WORDS) for folder in (tmp_path, tmp_path / "elsewhere"))
    assert prompts(here).fingerprint == prompts(there).fingerprint == prompts(here).fingerprint


@pytest.mark.parametrize("change", ["row", "answer", "order of rows", "seed", "held out", "template"])
def test_other_data_are_refused(tmp_path, change):
    mark = prompts(write(tmp_path / "set.jsonl", WORDS)).bookmark(5)
    words = {"row": [*WORDS[:-1], "w20"], "order of rows": WORDS[::-1]}.get(change, WORDS)
    changed = write(tmp_path / "changed.jsonl", words, "2" if change == "answer" else "1")
    settings = {"seed": {"seed": 1}, "held out": {"held_out": 3}, "template": {"template": "w0 {problem}"}}
    other = prompts(changed, **settings.get(change, {}))
    with pytest.raises(DataError, match=rf"fingerprint {mark['fingerprint']}, .* now {other.fingerprint}"):
        other.check_bookmark(mark)


def test_another_tokenizer_is_refused(tmp_path):
    source = FileProblems(write(tmp_path / "set.jsonl", WORDS), held_out=2)
    mark = Prompts(source, word_tokenizer(), limit=8).bookmark(0)
    template = "{% for m in messages %}<user> {{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="the tokenizer has changed"):
        Prompts(source, word_tokenizer(template), limit=8).check_bookmark(mark)


def test_a_checkpoint_without_a_fingerprint_is_refused(tmp_path):
    with pytest.raises(DataError, match="fingerprint None"):
        prompts(write(tmp_path / "set.jsonl", WORDS)).check_bookmark({})

"""Asking and judging with a sampler made up for the purpose: every response says what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl.data.problem import Problem
from rl.evaluation.benchmarks import BENCHMARKS
from rl.evaluation.exams import Exam, make_exam
from rl.evaluation.runner import run_exam
from rl.evaluation.samples import Sample, SampleFile
from rl.rewards.score import Score
from sampler.config import SamplingConfig
from sampler.engine import Completion
from tests.rl.tiny_chat import byte_tokenizer, make_data

TOKENIZER = byte_tokenizer()


class Stop(Exception):
    pass


class Sampler:
    """Answers with the prompt's length and the seed, and remembers how often each seed was drawn."""

    def __init__(self, calls: int = 10**6):
        self.calls, self.drawn, self.sizes = calls, [], []

    def __call__(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> list[list[Completion]]:
        if not self.calls:
            raise Stop
        self.calls -= 1
        self.drawn += [seed for own in seeds for seed in own]
        self.sizes.append(sum(map(len, seeds)))
        return [
            [self._completion(f"<think>no</think>{len(prompt)}/{seed}") for seed in own]
            for prompt, own in zip(prompts, seeds, strict=True)
        ]

    @staticmethod
    def _completion(text: str) -> Completion:
        ids = (*TOKENIZER(text)["input_ids"], 1)
        return Completion(ids, (0.0,) * len(ids), "stop", (0,) * len(ids))


def ask(exam: Exam, sampler: Sampler, part: int, seed: int = 1, **more: Any) -> list[Sample]:
    """Right when the seed is even; the judge sees no reasoning and the very problem that was answered."""
    lengths = {prompt.problem.id: len(prompt.token_ids) for prompt in exam.prompts}

    def judge(samples: Sequence[tuple[str, Problem]]) -> list[Score]:
        scores = []
        for response, problem in samples:
            length, drawn = map(int, response.split("/"))
            assert lengths[problem.id] == length
            scores.append(Score.of(drawn % 2 == 0) if drawn % 5 else Score.failed("died"))
        return scores

    return run_exam(exam, sampler, judge, seed=seed, part=part, **more)


@pytest.fixture
def exam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exam:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    protocol = BENCHMARKS["math500"].protocol
    return make_exam("math500", protocol, TOKENIZER, 9999, data_dir=str(make_data(tmp_path / "data")))


def test_every_problem_has_its_samples_in_order_each_with_its_own_seed_and_score(exam: Exam):
    """Symptoms: scores of other responses; all samples share a seed."""
    samples = ask(exam, Sampler(), part=5)
    assert [sample.key for sample in samples] == [(place, k) for place in range(3) for k in range(4)]
    assert len({sample.seed for sample in samples}) == 12
    for sample in samples:
        assert sample.response.endswith(f"/{sample.seed}")
        assert sample.response.startswith("<think>")  # kept in the record, hidden from the judge
        assert sample.tokens == len(sample.response) + 1
        assert (sample.error is not None) == (sample.seed % 5 == 0)
        assert sample.correct == (sample.error is None and sample.seed % 2 == 0)


def test_seeds_depend_neither_on_the_parts_nor_on_what_else_is_asked(exam: Exam):
    whole = ask(exam, Sampler(), part=100)
    assert ask(exam, Sampler(), part=1) == whole
    fewer = replace(exam, prompts=exam.prompts[1:], protocol=replace(exam.protocol, samples=2))
    assert ask(fewer, Sampler(), part=3) == [s for s in whole if s.position and s.sample < 2]
    assert ask(exam, Sampler(), part=100, seed=2) != whole


@pytest.mark.parametrize("calls", range(1, 6))
def test_a_stopped_evaluation_goes_on_and_generates_nothing_twice(exam: Exam, tmp_path: Path, calls: int):
    """Symptom: a crash during evaluation loses or repeats it."""
    whole = ask(exam, Sampler(), part=2)
    path = tmp_path / "s.jsonl"
    first, second = Sampler(calls), Sampler()
    with pytest.raises(Stop):
        ask(exam, first, part=2, file=SampleFile(path))
    assert ask(exam, second, part=2, file=SampleFile(path)) == whole
    assert sorted(first.drawn + second.drawn) == sorted(sample.seed for sample in whole)
    assert list(SampleFile(path).samples.values()) == whole
    third = Sampler(calls=0)
    assert ask(exam, third, part=2, file=SampleFile(path)) == whole


def test_more_samples_are_added_to_those_that_there_are(exam: Exam, tmp_path: Path):
    path, more = tmp_path / "s.jsonl", Sampler()
    ask(replace(exam, protocol=replace(exam.protocol, samples=2)), Sampler(), part=4, file=SampleFile(path))
    samples = ask(exam, more, part=4, file=SampleFile(path))
    assert len(more.drawn) == 6
    assert samples == ask(exam, Sampler(), part=4)


def test_progress_counts_what_was_there_and_parts_are_no_larger_than_asked(exam: Exam, tmp_path: Path):
    path, counts = tmp_path / "s.jsonl", []
    with pytest.raises(Stop):
        ask(exam, Sampler(1), part=5, file=SampleFile(path))
    sampler = Sampler()
    ask(exam, sampler, part=5, file=SampleFile(path), progress=counts.append)
    assert counts == [5, 10, 12]
    assert sampler.sizes == [5, 2]

"""Asks the questions of an exam and has the answers judged, in parts that are saved as they are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from rl.data.problem import Problem
from rl.data.prompts import Prompt
from rl.evaluation.exams import Exam
from rl.evaluation.samples import Sample, SampleFile
from rl.rewards.extraction import without_reasoning
from rl.rewards.pool import RewardPool
from rl.rewards.score import Score
from rl.rollout import response_seed
from sampler.config import SamplingConfig
from sampler.engine import Completion


class Generate(Protocol):
    """`sampler.engine.Sampler.generate`, wherever it runs."""

    def __call__(
        self, prompts: list[list[int]], seeds: list[list[int]], sampling: SamplingConfig
    ) -> list[list[Completion]]: ...


Task = tuple[Prompt, int]  # a prompt and the number of a sample


def run_exam(
    exam: Exam,
    generate: Generate,
    judge: Callable[[Sequence[tuple[str, Problem]]], list[Score]],
    *,
    seed: int,
    part: int,
    file: SampleFile | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Sample]:
    """The samples of the exam, by problem and number; those that `file` holds are not generated again.

    A sample's seed depends on `seed`, the benchmark, the problem and the sample's number, and on nothing else: two
    specs answer with the same draws. `part` samples are generated in one call and then saved. `progress` gets the
    number of samples that there are.
    """
    tasks = [(prompt, number) for prompt in exam.prompts for number in range(exam.protocol.samples)]
    done: dict[tuple[int, int], Sample] = dict(file.samples) if file else {}
    missing = [task for task in tasks if _key(task) not in done]
    progress(len(tasks) - len(missing))
    for start in range(0, len(missing), part):
        samples = _answer(exam, missing[start : start + part], generate, judge, seed)
        if file:
            file.append(samples)
        done |= {sample.key: sample for sample in samples}
        progress(len(tasks) - len(missing) + start + len(samples))
    if file and missing:
        file.sort()
    return [done[_key(task)] for task in tasks]


def pool_for(exam: Exam, workers: int, timeout_s: float) -> RewardPool:
    """The processes that judge the answers of an exam."""
    return RewardPool(exam.reward(), workers, timeout_s)


def _answer(
    exam: Exam,
    tasks: Sequence[Task],
    generate: Generate,
    judge: Callable[[Sequence[tuple[str, Problem]]], list[Score]],
    seed: int,
) -> list[Sample]:
    groups = list(_by_prompt(tasks))
    seeds = [
        [response_seed(seed, f"evaluate/{exam.name}", prompt.position, number) for number in numbers]
        for prompt, numbers in groups
    ]
    answers = generate([list(prompt.token_ids) for prompt, _ in groups], seeds, exam.sampling)
    flat = [completion for own in answers for completion in own]
    texts = [exam.text(completion.token_ids) for completion in flat]
    scores = judge(
        [(without_reasoning(text), prompt.problem) for text, (prompt, _) in zip(texts, tasks, strict=True)]
    )
    parts = zip(tasks, [one for own in seeds for one in own], texts, flat, scores, strict=True)
    return [
        _sample(task, own_seed, text, completion, score) for task, own_seed, text, completion, score in parts
    ]


def _by_prompt(tasks: Sequence[Task]) -> Iterator[tuple[Prompt, list[int]]]:
    """Consecutive tasks of one prompt together, in order."""
    groups: list[tuple[Prompt, list[int]]] = []
    for prompt, number in tasks:
        if not groups or groups[-1][0] is not prompt:
            groups.append((prompt, []))
        groups[-1][1].append(number)
    return iter(groups)


def _key(task: Task) -> tuple[int, int]:
    return task[0].position, task[1]


def _sample(task: Task, seed: int, text: str, completion: Completion, score: Score) -> Sample:
    prompt, number = task
    return Sample(
        problem=prompt.problem.id,
        position=prompt.position,
        sample=number,
        seed=seed,
        response=text,
        tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
        correct=score.correct,
        error=score.error,
        details=dict(score.details),
    )

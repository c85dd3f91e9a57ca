"""The benchmarks: where their problems are, what the model is asked, how answers are judged, how often and how sampled.

Where the published protocol is known, it is the default: AIME avg@6, MATH-500 and GSM8K avg@4. Sampling is that of
DAPO's validation (temperature 1, top-p 0.7; arXiv 2503.14476), IFEval is greedy with lm-eval's token limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kernels.catalogue import CATALOGUE

TRAINED = "trained"  # the spec under which a run trained
SPECS = (TRAINED, *CATALOGUE)  # what a policy can be evaluated under
INSTRUCTIONS = "ifeval"  # the reward that judges verifiable instructions one by one


@dataclass(frozen=True)
class EvaluationProtocol:
    """Everything about a question and its answers that changes a score.

    template: text of the prompt, with ``{problem}`` where the problem stands. chat: it is one user message, else
    plain text. parser: the rule of `rl.rewards.extraction` that finds the answer; None where none is needed. What is
    judged is always the response without its reasoning (`rl.rewards.extraction.without_reasoning`).
    """

    samples: int
    temperature: float
    top_p: float
    max_tokens: int
    template: str
    parser: str | None
    chat: bool = True


@dataclass(frozen=True)
class Source:
    """A file or hub data set, in the terms of `rl.data.rows.RowReader`; `path` of a file is its name."""

    path: str
    split: str = "train"
    prompt_column: str = "problem"
    answer_column: str | tuple[str, ...] = "answer"
    id_column: str | None = "id"
    answer_marker: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """`file` lies in the folder ``data_dir``; without one, problems come from `hub`."""

    name: str
    file: Source
    hub: Source
    reward: str
    protocol: EvaluationProtocol

    @property
    def metric(self) -> str:
        """The metric that stands for the benchmark; see `rl.evaluation.summary`."""
        return "prompt_strict" if self.reward == INSTRUCTIONS else "avg"


# The prompt of DAPO-Math-17k and of DAPO's AIME validation set.
_ANSWER_LINE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
    " $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\nRemember to put your"
    ' answer on its own line after "Answer:".'
)
_BOXED = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."
_GSM8K = '{problem} Let\'s think step by step and output the final answer after "####".'
_ASKED = ("instruction_id_list", "kwargs")

_AIME = EvaluationProtocol(
    samples=6, temperature=1.0, top_p=0.7, max_tokens=20_480, template=_ANSWER_LINE, parser="answer_line"
)

_TABLE = (
    Benchmark(
        "aime24",
        file=Source("aime24.jsonl"),
        hub=Source("HuggingFaceH4/aime_2024"),
        reward="math",
        protocol=_AIME,
    ),
    Benchmark(
        "aime25",
        file=Source("aime25.jsonl"),
        hub=Source("math-ai/aime25", split="test"),
        reward="math",
        protocol=_AIME,
    ),
    Benchmark(
        "math500",
        file=Source("math500.jsonl"),
        hub=Source("HuggingFaceH4/MATH-500", split="test", id_column="unique_id"),
        reward="math",
        protocol=EvaluationProtocol(
            samples=4, temperature=1.0, top_p=0.7, max_tokens=8192, template=_BOXED, parser="boxed"
        ),
    ),
    Benchmark(
        "gsm8k",
        file=Source("gsm8k_test.jsonl"),
        hub=Source(
            "openai/gsm8k:main", split="test", prompt_column="question", id_column=None, answer_marker="####"
        ),
        reward="math",
        protocol=EvaluationProtocol(
            samples=4, temperature=1.0, top_p=0.7, max_tokens=2048, template=_GSM8K, parser="gsm8k"
        ),
    ),
    Benchmark(
        "ifeval",
        file=Source("ifeval.jsonl", prompt_column="prompt", answer_column=_ASKED, id_column="key"),
        hub=Source("google/IFEval", prompt_column="prompt", answer_column=_ASKED, id_column="key"),
        reward=INSTRUCTIONS,
        protocol=EvaluationProtocol(
            samples=1, temperature=0.0, top_p=1.0, max_tokens=1280, template="{problem}", parser=None
        ),
    ),
)
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({benchmark.name: benchmark for benchmark in _TABLE})

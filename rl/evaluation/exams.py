"""A benchmark made ready for one model: its problems as prompts, and the fingerprints of all that decides a score."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl.data.order import held_out_order
from rl.data.problem import Message, Problem, content_hash
from rl.data.prompts import Prompt, encode
from rl.data.rows import PLACE, RowReader
from rl.errors import ConfigError, DataError
from rl.evaluation.benchmarks import BENCHMARKS, Benchmark, EvaluationProtocol
from rl.evaluation.config import sampling
from rl.rewards.registry import Reward, load_reward
from sampler.config import SamplingConfig

_CHOICE_SEED = 0  # of the problems chosen when not all are asked: the same for everybody


@dataclass(frozen=True)
class Exam:
    """Questions for one model.

    prompts: `position` is the problem's place in the data set. data: source, number of problems, fingerprint and
    prompts left out. template_hash: of the prompt's template and the tokenizer's chat template. fingerprint: of
    the answers, the prompts as tokens and the protocol, but not of how many problems and samples were chosen.
    """

    benchmark: Benchmark
    protocol: EvaluationProtocol
    prompts: tuple[Prompt, ...]
    data: dict[str, Any]
    template_hash: str
    fingerprint: str
    stop_token_ids: tuple[int, ...]
    tokenizer: Any

    @property
    def name(self) -> str:
        return self.benchmark.name

    @property
    def sampling(self) -> SamplingConfig:
        return sampling(self.protocol, self.stop_token_ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return max(len(prompt.token_ids) for prompt in self.prompts) + self.protocol.max_tokens

    def text(self, token_ids: Sequence[int]) -> str:
        """A response as text, without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def reward(self) -> Reward:
        """Raises ConfigError when reward and parser do not fit each other, or a package is missing."""
        return load_reward(self.benchmark.reward, self.protocol.parser)


def read_problems(benchmark: Benchmark, data_dir: str | None) -> tuple[tuple[Problem, ...], str]:
    """The problems, bare of any template, in the order of the data set, and where they were read.

    Raises DataError for a missing file or an unreachable hub, an empty or malformed data set, and repeated ids.
    """
    source = benchmark.hub if data_dir is None else benchmark.file
    path = source.path if data_dir is None else str(Path(data_dir) / source.path)
    reader = RowReader(
        prompt_column=source.prompt_column,
        answer_column=source.answer_column,
        id_column=source.id_column,
        answer_marker=source.answer_marker,
        answer_parser=None,
        template=PLACE,
        unwrap=None,
        chat=False,
    )
    problems: dict[str, Problem] = {}
    for statement in reader.read(path, source.split):
        if problems.setdefault(statement.problem.id, statement.problem) is not statement.problem:
            raise DataError(f"{statement.where}: id {statement.problem.id!r} occurs a second time")
    return tuple(problems.values()), path


def make_exam(
    name: str,
    protocol: EvaluationProtocol,
    tokenizer: Any,
    positions: int,
    *,
    data_dir: str | None = None,
    problems: int | None = None,
    overlong: str = "error",
    key: str = "protocol",
) -> Exam:
    """The benchmark `name` for a model of `positions` positions; `problems` of its problems, or all.

    `key`: where the configuration holds protocols, for messages.

    Raises DataError and ConfigError for data that cannot be read, prompts that leave no room for
    ``protocol.max_tokens`` (unless ``overlong="drop"``), and a protocol that does not fit the tokenizer.
    """
    if protocol.chat and not tokenizer.chat_template:
        raise ConfigError(f"{key}.{name}.chat=true: the model's tokenizer has no chat template")
    bare, path = read_problems(BENCHMARKS[name], data_dir)
    asked = [replace(problem, prompt=_prompt(problem, protocol)) for problem in bare]
    prompts = [Prompt(place, problem, encode(problem, tokenizer)) for place, problem in enumerate(asked)]
    room = positions - protocol.max_tokens
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= room]
    if len(fitting) < len(prompts) and (overlong == "error" or not fitting):
        longest = max(len(prompt.token_ids) for prompt in prompts)
        raise ConfigError(
            f"{key}.{name}.max_tokens={protocol.max_tokens}: there is room for {positions} tokens, and the longest"
            f" prompt has {longest} (max_tokens=N sets another limit, overlong=drop leaves prompts out)"
        )
    chosen = sorted(held_out_order(len(fitting), _CHOICE_SEED)[:problems])
    data = {
        "source": path,
        "problems": len(bare),
        "fingerprint": content_hash((), bare),
        "overlong": len(prompts) - len(fitting),
        "asked": len(chosen),
    }
    stops = (int(tokenizer.eos_token_id),)
    exam = Exam(
        BENCHMARKS[name],
        protocol,
        tuple(fitting[place] for place in chosen),
        data,
        _hash(protocol.template, tokenizer.chat_template if protocol.chat else None),
        _fingerprint(protocol, prompts, stops),
        stops,
        tokenizer,
    )
    try:
        exam.reward()
    except ConfigError as error:
        raise ConfigError(f"{key}.{name}: {error}") from error
    return exam


def _prompt(problem: Problem, protocol: EvaluationProtocol) -> str | tuple[Message, ...]:
    text = protocol.template.replace(PLACE, str(problem.prompt))
    return (Message("user", text),) if protocol.chat else text


def _fingerprint(protocol: EvaluationProtocol, prompts: Sequence[Prompt], stops: tuple[int, ...]) -> str:
    settings = {key: value for key, value in asdict(protocol).items() if key != "samples"}
    questions = [(prompt.problem.id, prompt.problem.answer, prompt.token_ids) for prompt in prompts]
    return _hash(settings, questions, stops)


def _hash(*parts: Any) -> str:
    """First 16 hexadecimal digits of SHA-256 over the parts as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

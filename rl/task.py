"""What a run is trained on: problems, tokenizer, prompts and, for a warm start, demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl.config import Config
from rl.config.data import ArithmeticData, FileData, SumsData
from rl.data.arithmetic import Arithmetic
from rl.data.files import FileProblems
from rl.data.problem import ProblemSource
from rl.data.prompts import Prompts
from rl.data.sums import Sums
from rl.data.tables import read_column
from rl.errors import ConfigError
from rl.models import cached_folder
from rl.validate import prompt_limit
from rl.warm_start import Demonstration


def problem_source(
    data: ArithmeticData | SumsData | FileData,
    seed: int,
    benchmarks: Mapping[str, Sequence[str]] | None = None,
) -> ProblemSource:
    """The problems that `data` names. Raises DataError when they are missing or malformed.

    benchmarks: name -> texts of problems with which those of a file are compared, beside `data.benchmarks`.
    """
    settings = {
        key: value for key, value in asdict(data).items() if key not in ("source", "overlong", "benchmarks")
    }
    match data:
        case ArithmeticData():
            return Arithmetic(**settings, seed=seed)
        case SumsData():
            return Sums(**settings, seed=seed)
        case FileData():
            texts = {name: read_column(**asdict(where)) for name, where in data.benchmarks.items()}
            return FileProblems(**settings, benchmarks={**(benchmarks or {}), **texts}, seed=seed)


def own_tokenizer(source: ProblemSource, cache: Path) -> Path | None:
    """The folder of the tokenizer that comes with the problems, or None: then it comes with the model."""
    if not isinstance(source, Arithmetic):
        return None
    tokenizer = source.tokenizer()

    def save(folder: Path) -> None:
        tokenizer.save_pretrained(folder)

    return cached_folder(cache, "tokenizer", {"vocabulary": tokenizer.get_vocab()}, save)


class Task:
    """Prompts as token ids, and texts back from responses.

    Raises DataError for prompts that do not fit, ConfigError for a warm start without demonstrations.
    """

    def __init__(self, config: Config, source: ProblemSource, model_folder: Path):
        from transformers import AutoTokenizer

        self.source = source
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
        self.prompts = Prompts(source, self.tokenizer, prompt_limit(config), config.data.overlong)
        self.stop_token_ids = (int(self.tokenizer.eos_token_id),)
        if config.model.warm_start.steps and not isinstance(source, Arithmetic):
            raise ConfigError(
                f"model.warm_start.steps={config.model.warm_start.steps}: data={config.data.source} has no"
                " demonstrations to start from"
            )

    def text(self, token_ids: Any) -> str:
        """The text of a response, without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def demonstrations(self, numbers: range, correct_share: float) -> list[Demonstration]:
        """Token ids of prompts and of answers, which end with the end token."""
        assert isinstance(self.source, Arithmetic)
        pairs = [self.source.demonstrations(number, correct_share) for number in numbers]
        texts = [text for pair in pairs for text in pair]
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        end = [self.stop_token_ids[0]]
        return [(prompt, answer + end) for prompt, answer in zip(encoded[::2], encoded[1::2], strict=True)]

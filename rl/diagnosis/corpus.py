"""The sequences that both engines score: sampled once, stored, and the same for every condition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """Sequences of token ids, each a prompt and a response; prompts: the number of each one's prompt, 0, 1, ..."""

    sequences: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]
    prompts: tuple[int, ...]

    def __post_init__(self) -> None:
        for sequence, length in zip(self.sequences, self.prompt_lengths, strict=True):
            if not 1 <= length < len(sequence):
                raise DataError(
                    f"a sequence of {len(sequence)} tokens with a prompt of {length}: needs a prompt and a response"
                )

    @property
    def tokens(self) -> int:
        """Of all responses."""
        return sum(map(len, self.sequences)) - sum(self.prompt_lengths)

    def first(self, prompts: int) -> Corpus:
        """The sequences of the first prompts."""
        kept = [index for index, prompt in enumerate(self.prompts) if prompt < prompts]
        return Corpus(
            tuple(self.sequences[i] for i in kept),
            tuple(self.prompt_lengths[i] for i in kept),
            tuple(self.prompts[i] for i in kept),
        )

    def clusters(self) -> np.ndarray:
        """int64 [tokens]: the prompt of each response token, sequence by sequence."""
        lengths = [len(s) - p for s, p in zip(self.sequences, self.prompt_lengths, strict=True)]
        return np.repeat(np.array(self.prompts, np.int64), lengths)

    def positions(self) -> np.ndarray:
        """int64 [tokens]: the place of each response token in its sequence."""
        spans = zip(self.prompt_lengths, self.sequences, strict=True)
        return np.concatenate([np.arange(length, len(sequence)) for length, sequence in spans])

    def response_tokens(self) -> np.ndarray:
        """int64 [tokens]: the token ids."""
        spans = zip(self.prompt_lengths, self.sequences, strict=True)
        return np.concatenate([np.array(sequence[length:]) for length, sequence in spans])

    def choose(self, per_sequence: int) -> list[np.ndarray]:
        """Positions, evenly spaced and at most `per_sequence` in each sequence, of states from which a response token
        is predicted: the last prompt token to the last but one."""
        chosen = []
        for sequence, length in zip(self.sequences, self.prompt_lengths, strict=True):
            states = np.arange(length - 1, len(sequence) - 1)
            places = np.linspace(0, len(states) - 1, min(per_sequence, len(states))).round().astype(int)
            chosen.append(states[places])
        return chosen

    def to_json(self) -> str:
        return json.dumps(
            [
                {"prompt": prompt, "prompt_length": length, "tokens": list(sequence)}
                for prompt, length, sequence in zip(
                    self.prompts, self.prompt_lengths, self.sequences, strict=True
                )
            ]
        )

    @classmethod
    def read(cls, path: Path) -> Corpus:
        """The inverse of `to_json`, from a file. Raises DataError."""
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
            parts = [(tuple(row["tokens"]), int(row["prompt_length"]), int(row["prompt"])) for row in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"sequences={str(path)!r}: a JSON list of prompt, prompt_length, tokens is needed ({error!r})"
            ) from error
        if not parts:
            raise DataError(f"sequences={str(path)!r}: holds no sequence")
        sequences, lengths, prompts = zip(*parts, strict=True)
        if sorted(set(prompts)) != list(range(len(set(prompts)))):
            raise DataError(f"sequences={str(path)!r}: prompts must be numbered 0, 1, ...")
        return cls(sequences, lengths, prompts)


def check_fits(corpus: Corpus, vocab: int, longest: int) -> None:
    """Raise DataError for token ids that the model has not, and for sequences longer than the engines take."""
    found = max(map(max, corpus.sequences))
    if found >= vocab or min(map(min, corpus.sequences)) < 0:
        raise DataError(f"sequences: token ids must lie in [0, {vocab}), got up to {found}")
    most = max(map(len, corpus.sequences))
    if most > longest:
        raise DataError(f"sequences: one has {most} tokens, sampler.max_model_len={longest} is the most")


def flat(parts: Sequence[Sequence[float]] | Sequence[np.ndarray]) -> np.ndarray:
    """float64 [tokens] of one array a sequence."""
    return np.concatenate([np.asarray(part, np.float64) for part in parts])

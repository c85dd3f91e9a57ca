"""Problems as token ids, none longer than the engines can take, and none ever cut."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from rl.data.problem import Problem, ProblemSource
from rl.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """A problem as the engines see it. `position` numbers the draws of a run, or the held-out problems."""

    position: int
    problem: Problem
    token_ids: tuple[int, ...]


class Prompts:
    """The problems of `source`, tokenised; prompts of more than `limit` tokens are refused or left out.

    Everything is tokenised once here, so that an overlong prompt is found before a run starts. With
    ``overlong="drop"`` each epoch passes through the prompts that fit; positions count those.

    `fingerprint`: 16 hexadecimal digits of a SHA-256 over ids, answers and token ids of the first epoch in its
    order and of the held-out problems: it changes with the data, the seed, the template and the tokenizer.

    Raises DataError for an overlong prompt (``overlong="error"``), when none fits, and what `encode` raises.
    """

    def __init__(
        self, source: ProblemSource, tokenizer: Any, limit: int, overlong: Literal["error", "drop"] = "error"
    ):
        self._source, self._tokenizer, self._limit, self._overlong = source, tokenizer, limit, overlong
        self._longest = 0
        self._dropped: set[str] = set()
        digest = hashlib.sha256()
        for position in range(source.training_count):
            problem = source.training(position)
            ids = self._fitting(problem)
            if ids is None:
                self._dropped.add(problem.id)
            else:
                digest.update(repr((problem.id, problem.answer, ids)).encode())
        self.training_count = source.training_count - len(self._dropped)
        if not self.training_count:
            raise DataError(f"none of the {source.training_count} training prompts fits into {limit} tokens")
        held_out = ((index, problem, self._fitting(problem)) for index, problem in enumerate(source.held_out))
        self.held_out = tuple(Prompt(index, problem, ids) for index, problem, ids in held_out if ids)
        for prompt in self.held_out:
            digest.update(
                repr(("held out", prompt.problem.id, prompt.problem.answer, prompt.token_ids)).encode()
            )
        self.fingerprint = digest.hexdigest()[:16]
        self._positions = lru_cache(maxsize=2)(self._fitting_positions)

    def training(self, position: int) -> Prompt:
        """The prompt at `position`, in the sense of `rl.data.problem.ProblemSource`."""
        problem = self._source.training(self._position_in_source(position))
        return Prompt(position, problem, encode(problem, self._tokenizer))

    def bookmark(self, position: int) -> dict[str, str | int]:
        """What a checkpoint keeps of the data: `position` of the next prompt, its epoch from 0, `fingerprint`."""
        return {
            "position": position,
            "epoch": position // self.training_count,
            "fingerprint": self.fingerprint,
        }

    def check_bookmark(self, bookmark: Mapping[str, Any]) -> None:
        """Raise DataError unless `bookmark` was made with these very prompts in this very order."""
        found = bookmark.get("fingerprint")
        if found != self.fingerprint:
            raise DataError(
                f"the checkpoint was written with data of fingerprint {found}, and that of the data is now"
                f" {self.fingerprint}: the data set, its order or the tokenizer has changed, and the run cannot be"
                " resumed with it"
            )

    def describe(self) -> dict[str, str | int | bool | None]:
        """What the source says, and fingerprint, prompt_limit, longest_prompt (tokens, among those kept) and the
        counts overlong_training and overlong_held_out of prompts left out."""
        return self._source.describe() | {
            "fingerprint": self.fingerprint,
            "prompt_limit": self._limit,
            "longest_prompt": self._longest,
            "overlong_training": len(self._dropped),
            "overlong_held_out": len(self._source.held_out) - len(self.held_out),
        }

    def _fitting(self, problem: Problem) -> tuple[int, ...] | None:
        """The prompt's token ids; None when they are too many and the problem is to be left out."""
        ids = encode(problem, self._tokenizer)
        if len(ids) <= self._limit:
            self._longest = max(self._longest, len(ids))
            return ids
        if self._overlong == "drop":
            return None
        raise DataError(
            f"problem {problem.id!r} of {problem.source} has a prompt of {len(ids)} tokens,"
            f" and {self._limit} is the limit (data.overlong=drop leaves such problems out)"
        )

    def _position_in_source(self, position: int) -> int:
        if not self._dropped or position < 0:
            return position
        epoch, offset = divmod(position, self.training_count)
        return self._positions(epoch)[offset]

    def _fitting_positions(self, epoch: int) -> list[int]:
        first = epoch * self._source.training_count
        positions = range(first, first + self._source.training_count)
        return [position for position in positions if self._source.training(position).id not in self._dropped]


def encode(problem: Problem, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of the prompt, tokenised once.

    A chat goes through the tokenizer's chat template, up to where the answer begins; the template writes all
    special tokens itself. Plain text gets the special tokens that the tokenizer puts around text.

    Raises DataError for a chat when the tokenizer has no chat template, for a prompt without tokens, and for
    one with two beginning-of-sequence tokens (text that brings its own to a tokenizer that adds one).
    """
    if isinstance(problem.prompt, str):
        ids = tokenizer(problem.prompt)["input_ids"]
    elif tokenizer.chat_template:
        chat = [asdict(message) for message in problem.prompt]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        raise DataError(
            f"problem {problem.id!r} is a chat, but the tokenizer has no chat template"
            " (data.chat=false asks without)"
        )
    if not ids:
        raise DataError(f"problem {problem.id!r} has a prompt without tokens")
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        raise DataError(f"problem {problem.id!r} has a prompt with two beginning-of-sequence tokens")
    return tuple(ids)

"""Partial rollouts: a response grows by at most a budget of tokens in a round of sampling, and goes on in a later one.

After Kimi k1.5 (arXiv 2501.12599, "partial rollouts"): a round is over after as many decoding steps as the budget has
tokens, however long the longest response gets. Where a response is cut depends on itself alone, not on what shares the
call or on how many samplers there are, as it would with a budget of all responses together. A cut response ends in the
engine as one at its token limit does, which frees its cache; the engine needs no abort.

What was written stays as it is: every token keeps its log-probability, its version and its experts. Later weights
read prompt and tokens so far anew and write on, with a seed of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rl.data.prompts import Prompt
from rl.rollout import Group
from sampler.engine import Completion

UNFINISHED = "budget"  # finish_reason of a response that is to go on
NOT_BEGUN = Completion((), (), UNFINISHED, ())


@dataclass(frozen=True)
class PartialGroup:
    """The responses to one prompt while they are written."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    @property
    def unfinished(self) -> list[int]:
        """The numbers of the responses that are to go on."""
        return [k for k, c in enumerate(self.completions) if c.finish_reason == UNFINISHED]

    @property
    def tokens(self) -> int:
        """Of all its responses."""
        return sum(len(completion.token_ids) for completion in self.completions)


@dataclass(frozen=True)
class Backlog:
    """What is put aside when a batch is full: groups that are being written, and complete ones for which the batch had
    no room, in the order in which they will be taken.
    """

    under_way: tuple[PartialGroup, ...] = ()
    waiting: tuple[Group, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.under_way or self.waiting)

    @property
    def unfinished(self) -> int:
        """Responses that are to go on."""
        return sum(len(group.unfinished) for group in self.under_way)

    def metrics(self) -> dict[str, float]:
        return {
            "partial/put_aside": self.unfinished,
            "partial/put_aside_tokens": sum(group.tokens for group in self.under_way),
            "partial/waiting": len(self.waiting),
        }

    def __str__(self) -> str:
        tokens = sum(group.tokens for group in self.under_way)
        return (
            f"{self.unfinished} responses of {len(self.under_way)} groups are not finished ({tokens} tokens in these"
            f" groups), and {len(self.waiting)} complete groups wait for a batch"
        )


NOTHING = Backlog()


@dataclass(frozen=True)
class Request:
    """What a sampler is asked for: to go on from `tokens`, once for each of `seeds`, by at most `limit` tokens."""

    tokens: list[int]
    seeds: list[int]
    limit: int


def begin(prompt: Prompt, size: int) -> PartialGroup:
    """A group of `size` responses none of which has a token."""
    return PartialGroup(prompt, (NOT_BEGUN,) * size)


def requests(
    groups: Iterable[PartialGroup], seed: Callable[[int, int], int], max_tokens: int, budget: int
) -> list[Request]:
    """For all unfinished responses, in order. A group that is not begun is one request, any other response is its own.

    seed: of the response to the prompt at a position with a number (`rl.rollout.response_seed`). max_tokens: of a whole
    response; budget: of what it grows by.
    """
    found = []
    for group in groups:
        position, tokens, cut = group.prompt.position, list(group.prompt.token_ids), group.unfinished
        if not group.tokens:
            found.append(Request(tokens, [seed(position, k) for k in cut], min(budget, max_tokens)))
            continue
        for k in cut:
            written = group.completions[k].token_ids
            own = continuation_seed(seed(position, k), len(written))
            found.append(Request([*tokens, *written], [own], min(budget, max_tokens - len(written))))
    return found


def grown(groups: Iterable[PartialGroup], parts: Iterable[Completion], max_tokens: int) -> list[PartialGroup]:
    """`groups` with what the samplers answered to their `requests`, one part a response, in order."""
    answers = iter(parts)
    return [
        PartialGroup(
            group.prompt, tuple(_grown(completion, answers, max_tokens) for completion in group.completions)
        )
        for group in groups
    ]


def separate(groups: Sequence[PartialGroup]) -> tuple[list[PartialGroup], list[PartialGroup]]:
    """Those whose responses are all finished, and the others."""
    return [g for g in groups if not g.unfinished], [g for g in groups if g.unfinished]


def continuation_seed(seed: int, written: int) -> int:
    """A 63-bit seed for what follows the first `written` tokens of the response with `seed`: vLLM's generators count
    from the beginning of a request, and would repeat the draws of the part before.
    """
    if not written:
        return seed
    digest = hashlib.blake2b(f"{seed}/{written}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _grown(begun: Completion, answers: Iterator[Completion], max_tokens: int) -> Completion:
    return joined(begun, next(answers), max_tokens) if begun.finish_reason == UNFINISHED else begun


def joined(begun: Completion, part: Completion, max_tokens: int) -> Completion:
    """A response and what was written behind it. It is to go on unless it met a stop token or has `max_tokens`."""
    token_ids = begun.token_ids + part.token_ids
    cut = part.finish_reason == "length" and len(token_ids) < max_tokens
    return Completion(
        token_ids,
        begun.logp + part.logp,
        UNFINISHED if cut else part.finish_reason,
        begun.versions + part.versions,
        _joined_routes(begun.routes, part.routes),
    )


def _joined_routes(begun: np.ndarray | None, part: np.ndarray | None) -> np.ndarray | None:
    """The experts under which each token was written. The last token of `begun` was never computed there; it was for
    what follows, by the weights that wrote that.
    """
    if begun is None or part is None:
        return part
    return np.concatenate([begun[:-1], part[len(begun) - 1 :]])

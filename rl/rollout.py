"""Rollouts: from problems to groups of scored responses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl.data.problem import Problem
from rl.rewards.score import Score

if TYPE_CHECKING:
    from sampler.config import SamplingConfig


@dataclass(frozen=True)
class Prompt:
    """A problem as the engines see it. `position` numbers the draws of a run; it seeds the sampling."""

    position: int
    problem: Problem
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Rollout:
    """One response: token ids, the sampler's FP32 log-probability of each, and the weights' version."""

    token_ids: tuple[int, ...]
    logp: tuple[float, ...]
    version: int
    truncated: bool
    score: Score


@dataclass(frozen=True)
class Group:
    """The responses to one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> list[float]:
        return [rollout.score.value for rollout in self.rollouts]


def generate_groups(
    prompts: Sequence[Prompt],
    group_size: int,
    *,
    purpose: str,
    seed: int,
    samplers: Sequence[Any],
    sampling: SamplingConfig,
    rewards: Any,
    decode: Any,
) -> list[Group]:
    """Sample `group_size` responses to each prompt and score them; the order of `prompts` is kept.

    Every response has a seed of its own, from (`seed`, `purpose`, prompt position, sample number): the result
    depends neither on the number of samplers nor on where a run was resumed.
    """
    from rl.cluster import wait

    shares = [range(index, len(prompts), len(samplers)) for index in range(len(samplers))]
    started = [
        sampler.later.generate(
            [list(prompts[row].token_ids) for row in share],
            [[response_seed(seed, purpose, prompts[row].position, k) for k in range(group_size)] for row in share],
            sampling,
        )
        for sampler, share in zip(samplers, shares, strict=True)
        if len(share)
    ]
    completions: list[Any] = [None] * len(prompts)
    for share, done in zip(shares, wait(started), strict=False):
        for row, samples in zip(share, done, strict=True):
            completions[row] = samples

    flat = [(row, completion) for row, samples in enumerate(completions) for completion in samples]
    scores = rewards.score([(decode(completion.token_ids), prompts[row].problem) for row, completion in flat])
    rollouts = [
        Rollout(tuple(c.token_ids), tuple(c.logp), c.version, c.finish_reason == "length", score)
        for (_, c), score in zip(flat, scores, strict=True)
    ]
    return [
        Group(prompt, tuple(rollouts[row * group_size : (row + 1) * group_size])) for row, prompt in enumerate(prompts)
    ]


def response_seed(seed: int, purpose: str, position: int, sample: int) -> int:
    """A 63-bit seed that depends on all four arguments and on nothing else."""
    text = f"{seed}/{purpose}/{position}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Sequences:
    """Groups as right-padded tensors; position t of a row carries the value of token t.

    tokens int64 [B, S]; lengths int64 [B]; loss_mask bool [B, S], True at response tokens; sampler_logp float32
    [B, S], 0 elsewhere.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    loss_mask: torch.Tensor
    sampler_logp: torch.Tensor


def to_sequences(groups: Sequence[Group]) -> Sequences:
    """The prompt and response of every rollout, group after group."""
    rows = [(group.prompt.token_ids, rollout) for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([len(prompt) + len(rollout.token_ids) for prompt, rollout in rows])
    shape = (len(rows), int(lengths.max()))
    tokens, logp = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for row, (prompt, rollout) in enumerate(rows):
        response = slice(len(prompt), len(prompt) + len(rollout.token_ids))
        tokens[row, : response.stop] = torch.tensor(prompt + rollout.token_ids)
        logp[row, response] = torch.tensor(rollout.logp)
        loss_mask[row, response] = True
    return Sequences(tokens, lengths, loss_mask, logp)

"""Rollouts: responses to prompts, their scores, and the tensors that the learner takes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.routing import NO_ROUTE
from rl.data.prompts import Prompt
from rl.rewards.score import Score
from sampler.engine import Completion


@dataclass(frozen=True)
class Rollout:
    """One response and its score."""

    completion: Completion
    score: Score

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off at the token limit."""
        return self.completion.finish_reason == "length"


@dataclass(frozen=True)
class Group:
    """The responses to one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def scores(self) -> list[Score]:
        return [rollout.score for rollout in self.rollouts]

    @property
    def rewards(self) -> list[float]:
        return [rollout.score.value for rollout in self.rollouts]


@dataclass(frozen=True)
class Sequences:
    """Groups as right-padded tensors; position t of a row carries the value of token t.

    tokens int64 [B, S]; lengths int64 [B]; loss_mask bool [B, S], True at response tokens; sampler_logp float32
    [B, S], 0 elsewhere; versions int32 [B, S], of the weights that wrote each response token, -1 elsewhere; routes
    int16 [B, S, layers, k], the sampler's experts, NO_ROUTE elsewhere; None if they were not returned.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    loss_mask: torch.Tensor
    sampler_logp: torch.Tensor
    versions: torch.Tensor
    routes: torch.Tensor | None = None


def to_sequences(groups: Sequence[Group]) -> Sequences:
    """The prompt and response of every rollout, group after group."""
    rows = [(group.prompt.token_ids, rollout.completion) for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([len(prompt) + len(completion.token_ids) for prompt, completion in rows])
    shape = (len(rows), int(lengths.max()))
    tokens, logp = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    versions = torch.full(shape, -1, dtype=torch.int32)
    for row, (prompt, completion) in enumerate(rows):
        response = slice(len(prompt), len(prompt) + len(completion.token_ids))
        tokens[row, : response.stop] = torch.tensor([*prompt, *completion.token_ids])
        logp[row, response] = torch.tensor(completion.logp)
        versions[row, response] = torch.tensor(completion.versions, dtype=torch.int32)
        loss_mask[row, response] = True
    routes = _padded_routes([completion for _, completion in rows], shape)
    return Sequences(tokens, lengths, loss_mask, logp, versions, routes)


def _padded_routes(completions: Sequence[Completion], shape: tuple[int, int]) -> torch.Tensor | None:
    first = completions[0].routes
    if first is None:
        return None
    routes = torch.full((*shape, *first.shape[1:]), NO_ROUTE, dtype=torch.int16)
    for row, completion in enumerate(completions):
        assert completion.routes is not None
        routes[row, : len(completion.routes)] = torch.from_numpy(completion.routes.copy())
    return routes


def response_seed(seed: int, purpose: str, position: int, sample: int) -> int:
    """A 63-bit seed that depends on all four arguments and on nothing else.

    So a response depends neither on how many samplers there are nor on where a run was resumed.
    """
    text = f"{seed}/{purpose}/{position}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def response_statistics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and lengths over all responses, before any group is filtered.

    A response whose verifier failed counts in reward/error_rate and nowhere else among the rewards.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout.score for rollout in rollouts if rollout.score.error is None]
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    cut = sum(rollout.truncated for rollout in rollouts)
    return {
        "reward/mean": sum(score.value for score in scored) / max(len(scored), 1),
        "reward/accuracy": sum(score.correct for score in scored) / max(len(scored), 1),
        "reward/error_rate": 1 - len(scored) / len(rollouts),
        "response/length_mean": sum(lengths) / len(rollouts),
        "response/length_max": max(lengths),
        "response/truncated": cut / len(rollouts),
        "tokens/generated": sum(lengths),
    }

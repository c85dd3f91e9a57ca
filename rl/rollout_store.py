"""Rollouts in files, so that a checkpoint can hold a batch that was drawn ahead of its update, and what was put aside.

A folder holds `rollouts.safetensors` (token ids, log-probabilities, versions and routes, one response after another)
and `rollouts.json` (everything else). Prompts are not stored: their positions are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rl.data.prompts import Prompt
from rl.errors import DataError
from rl.partial import NOTHING, Backlog, PartialGroup
from rl.pipeline import RolloutBatch
from rl.rewards.score import Score
from rl.rollout import Group, Rollout
from sampler.engine import Completion

_ARRAYS, _REST = "rollouts.safetensors", "rollouts.json"
PromptAt = Callable[[int], Prompt]


def save_rollouts(folder: Path, batch: RolloutBatch) -> None:
    """Write `batch` into `folder`, which is made; its backlog is not written."""
    rest = {"position": batch.position, "metrics": batch.metrics}
    _save(folder, [_unscored(group) for group in batch.groups], _scores(batch.groups), rest)


def load_rollouts(folder: Path, prompt_at: PromptAt) -> RolloutBatch | None:
    """What `save_rollouts` wrote, with the prompts that `prompt_at` gives for positions; None without a folder. Raises
    DataError for files of another form.
    """
    if not folder.exists():
        return None
    groups, scores, rest = _load(folder, prompt_at)
    return RolloutBatch(_scored(groups, scores), rest["position"], rest["metrics"])


def save_backlog(folder: Path, backlog: Backlog) -> None:
    """Write `backlog` into `folder`, which is made."""
    waiting = [_unscored(group) for group in backlog.waiting]
    _save(folder, [*waiting, *backlog.under_way], _scores(backlog.waiting), {})


def load_backlog(folder: Path, prompt_at: PromptAt) -> Backlog:
    """What `save_backlog` wrote, as `load_rollouts` does; empty without a folder."""
    if not folder.exists():
        return NOTHING
    groups, scores, _ = _load(folder, prompt_at)
    return Backlog(tuple(groups[len(scores) :]), tuple(_scored(groups, scores)))


def _unscored(group: Group) -> PartialGroup:
    return PartialGroup(group.prompt, tuple(rollout.completion for rollout in group.rollouts))


def _scores(groups: Sequence[Group]) -> list[list[Score]]:
    return [group.scores for group in groups]


def _scored(groups: Sequence[PartialGroup], scores: Sequence[Sequence[Score]]) -> list[Group]:
    """Of the first of `groups`, as many as there are scores of."""
    return [
        Group(group.prompt, tuple(map(Rollout, group.completions, own)))
        for group, own in zip(groups, scores, strict=False)
    ]


def _save(
    folder: Path, groups: Sequence[PartialGroup], scores: Sequence[Sequence[Score]], rest: dict[str, Any]
) -> None:
    completions = [completion for group in groups for completion in group.completions]
    arrays = {
        "lengths": np.array([len(c.token_ids) for c in completions]),
        "token_ids": np.array([token for c in completions for token in c.token_ids]),
        "logp": np.array([value for c in completions for value in c.logp], np.float32),
        "versions": np.array([version for c in completions for version in c.versions], np.int32),
    }
    routes = [completion.routes for completion in completions if completion.routes is not None]
    if routes:
        arrays["routes"] = np.concatenate(routes)
    rest |= {
        "prompts": [group.prompt.position for group in groups],
        "finish_reasons": [
            [completion.finish_reason for completion in group.completions] for group in groups
        ],
        "scores": [[asdict(score) for score in own] for own in scores],
    }
    folder.mkdir(parents=True)
    save_file(arrays, folder / _ARRAYS)
    (folder / _REST).write_text(json.dumps(rest, allow_nan=False), encoding="utf-8")


def _load(folder: Path, prompt_at: PromptAt) -> tuple[list[PartialGroup], list[list[Score]], dict[str, Any]]:
    arrays = load_file(folder / _ARRAYS)
    rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
    if missing := [key for key in ("prompts", "finish_reasons", "scores") if key not in rest]:
        raise DataError(
            f"{folder / _REST} lacks {', '.join(missing)}: another version of miniTE wrote it; go on with that one, or"
            " start a new run"
        )
    lengths = iter(arrays["lengths"].tolist())
    groups, token, routed = [], 0, 0
    for position, reasons in zip(rest["prompts"], rest["finish_reasons"], strict=True):
        prompt, completions = prompt_at(position), []
        for reason in reasons:
            own = slice(token, token + next(lengths))
            rows = slice(routed, routed + len(prompt.token_ids) + own.stop - own.start)
            completion = Completion(
                tuple(arrays["token_ids"][own].tolist()),
                tuple(arrays["logp"][own].tolist()),
                reason,
                tuple(arrays["versions"][own].tolist()),
                arrays["routes"][rows] if "routes" in arrays else None,
            )
            completions.append(completion)
            token, routed = own.stop, rows.stop
        groups.append(PartialGroup(prompt, tuple(completions)))
    return groups, [[Score(**score) for score in own] for own in rest["scores"]], rest

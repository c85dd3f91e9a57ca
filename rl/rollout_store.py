"""Scored rollouts in files, so that a checkpoint can hold a batch that was drawn ahead of its update.

A folder holds `rollouts.safetensors` (token ids, log-probabilities and routes, one response after another) and
`rollouts.json` (everything else). Prompts are not stored: their positions are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from rl.data.prompts import Prompt
from rl.pipeline import RolloutBatch
from rl.rewards.score import Score
from rl.rollout import Group, Rollout
from sampler.engine import Completion

_ARRAYS, _REST = "rollouts.safetensors", "rollouts.json"


def save_rollouts(folder: Path, batch: RolloutBatch) -> None:
    """Write `batch` into `folder`, which is made."""
    completions = [rollout.completion for group in batch.groups for rollout in group.rollouts]
    arrays = {
        "lengths": np.array([len(c.token_ids) for c in completions]),
        "token_ids": np.array([token for c in completions for token in c.token_ids]),
        "logp": np.array([value for c in completions for value in c.logp], np.float32),
    }
    routes = [completion.routes for completion in completions if completion.routes is not None]
    if routes:
        arrays["routes"] = np.concatenate(routes)
    rest = {
        "position": batch.position,
        "metrics": batch.metrics,
        "groups": [
            {
                "prompt": group.prompt.position,
                "rollouts": [
                    {
                        "finish_reason": rollout.completion.finish_reason,
                        "version": rollout.completion.version,
                        "score": asdict(rollout.score),
                    }
                    for rollout in group.rollouts
                ],
            }
            for group in batch.groups
        ],
    }
    folder.mkdir(parents=True)
    save_file(arrays, folder / _ARRAYS)
    (folder / _REST).write_text(json.dumps(rest, allow_nan=False), encoding="utf-8")


def load_rollouts(folder: Path, prompt_at: Callable[[int], Prompt]) -> RolloutBatch | None:
    """What `save_rollouts` wrote, with the prompts that `prompt_at` gives for positions; None without a folder."""
    if not folder.exists():
        return None
    arrays = load_file(folder / _ARRAYS)
    rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
    groups, response, token, routed = [], 0, 0, 0
    for stored in rest["groups"]:
        prompt, rollouts = prompt_at(stored["prompt"]), []
        for entry in stored["rollouts"]:
            own = slice(token, token + int(arrays["lengths"][response]))
            rows = slice(routed, routed + len(prompt.token_ids) + own.stop - own.start)
            completion = Completion(
                tuple(arrays["token_ids"][own].tolist()),
                tuple(arrays["logp"][own].tolist()),
                entry["finish_reason"],
                entry["version"],
                arrays["routes"][rows] if "routes" in arrays else None,
            )
            rollouts.append(Rollout(completion, Score(**entry["score"])))
            response, token, routed = response + 1, own.stop, rows.stop
        groups.append(Group(prompt, tuple(rollouts)))
    return RolloutBatch(groups, rest["position"], rest["metrics"])

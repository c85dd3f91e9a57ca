"""Drivers that join a Ray of several nodes, each in a process of its own: `python -m tests.rl.node_driver NAME ...`.

They print what they found as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from learner.config import LearnerConfig
from learner.initialize import initialize
from learner.policy import Policy
from rl.cluster import joined_cluster, start_actor
from rl.compose import load_config
from rl.config import Config
from rl.config.cluster import SyncConfig
from rl.errors import UserError
from rl.group import start_group
from rl.nodes import open_nodes
from rl.placement import Place
from rl.sync.weight_sync import WeightSync
from tests.rl.group_actors import OpenLearner, PlainSampler
from tests.rl.group_model import MAP, MODEL, sequences


def configured(address: str, *overrides: str) -> Config:
    own = [f"cluster.ray_address={address}", "cluster.patience_s=3", *overrides]
    return load_config(["+recipe=tiny", "learner.data_parallel=2", *own])


def refused(address: str, folder: str, *cases: str) -> dict[str, str]:
    """The line with which each of the cases, overrides joined by commas, is refused."""
    found = {}
    for case in cases:
        with joined_cluster(address):
            try:
                open_nodes(
                    configured(address, *case.split(",")), Path(folder) / "run", Path(folder) / "model"
                )
            except UserError as error:
                found[case] = str(error)
    return found


def synced(address: str) -> dict[str, Any]:
    """A learner of two ranks on two nodes, and a sampler on the second: how far their scores are from those of one
    process, and whether the sampler holds after a sync by each transport what that would have sent.
    """
    with joined_cluster(address), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        initialize(model, MODEL, seed=0)
        (folder / "run").mkdir()
        first, second = open_nodes(configured(address, "cluster.nodes=2"), folder / "run", model)
        config, places = LearnerConfig(data_parallel=2, threads=1), [Place(first), Place(second)]
        learner = start_group(OpenLearner, "learner", config, folder, model, MAP, config, 0, places=places)
        alone, given = Policy(model, MAP, LearnerConfig(), 0), sequences()
        log, here = folder / "log", Place(second)
        sampler = start_actor(PlainSampler, "sampler", 1, log, alone.export_layout(), MAP, place=here)
        gap = (
            learner.score(given, 1.0, 1.0).logp
            - alone.score(given.tokens, given.lengths, given.loss_mask, 1.0).logp
        )
        found: dict[str, Any] = {"gap": gap.abs().max().item()}
        for transport in ("ray", "process_group"):
            sampler.forget()
            WeightSync(learner, [sampler], MAP, SyncConfig(transport=transport)).sync(1)
            content = sampler.content()
            sent = dict(alone.export())
            found[transport] = content.keys() == sent.keys() and all(
                content[key].view(torch.uint8).equal(tensor.contiguous().view(torch.uint8))
                for key, tensor in sent.items()
            )
        return found


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    print(json.dumps({"refused": refused, "synced": synced}[command](*arguments)))

"""Bytes of a sync by each codec over real updates, and whether a sampler fed by changes holds what a whole sync gives.

    python scripts/bench/sync_codecs.py [--updates 20] [+recipe=tiny] [group.key=value ...]

The recipe's model in the real learner takes optimiser steps (language-model loss on its prompts, at the recipe's
learning rate); after each, three receivers are brought to the new version, one by each codec, attested. At the end a
fresh receiver gets whole tensors, and everything that the others hold is compared with it byte for byte.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kernels.digest import byte_view
from kernels.experts import ExpertWeights, StoredLayout, derived_name, wire_name
from kernels.precision_map import PrecisionMap
from kernels.reference import prepare
from kernels.shard import NO_SHARDS, Shards
from learner.policy import Policy
from rl.compose import load_config
from rl.models import initial_model, model_architecture
from rl.sync.codecs import CODECS
from rl.sync.protocol import attest
from rl.sync.receiver import Receiver
from rl.sync.sender import Sender
from rl.task import Task, own_tokenizer, problem_source
from rl.validate import resolve_maps

ROWS = 8  # of a batch


class Held:
    """A sampler's tensors without an engine: an `rl.sync.receiver.Holder`."""

    def __init__(self, policy: Policy, precision_map: PrecisionMap) -> None:
        self.precision_map, self.layout, self.version = precision_map, StoredLayout.ROWS, 0
        self.closed: str | None = None
        self.shards: Shards = NO_SHARDS
        layout = policy.export_layout(precision_map)
        self._live = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._live

    def refresh(self) -> dict[str, torch.Tensor]:
        derived = {}
        for layer, spec in enumerate(self.precision_map.layers):
            prefix = wire_name(layer, "")
            stored = {n.removeprefix(prefix): t for n, t in self._live.items() if n.startswith(prefix)}
            parts = prepare(ExpertWeights.from_tensors(stored, spec), spec).derived()
            derived |= {derived_name(layer, part): tensor for part, tensor in parts.items()}
        return derived

    def same_as(self, other: Held) -> bool:
        theirs = other.tensors()
        return all(torch.equal(byte_view(t), byte_view(theirs[name])) for name, t in self._live.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.overrides or ["+recipe=tiny"])
    source = problem_source(config.data, config.run.seed)
    cache = Path(config.run.cache_dir)
    model = initial_model(config.model, own_tokenizer(source, cache), config.run.seed, cache)
    precision_map, _ = resolve_maps(config.spec, model_architecture(model).layers)
    task = Task(config, source, model)
    policy = Policy(model, precision_map, config.learner, config.run.seed)
    senders = {codec: Sender(policy, precision_map, keep=True) for codec in CODECS}
    holders = {codec: Held(policy, precision_map) for codec in CODECS}
    receivers = {codec: Receiver(holder) for codec, holder in holders.items()}
    bucket = config.sync.bucket_mib * 2**20
    print(f"{model.name}, spec {config.spec.name}, lr {config.learner.lr}; bytes of each sync")
    print(f"{'version':>8s} " + " ".join(f"{codec:>10s}" for codec in CODECS))
    for version in range(1, arguments.updates + 2):
        spent = [sync(senders[codec], receivers[codec], version, codec, bucket) for codec in CODECS]
        print(f"{version:8d} " + " ".join(f"{size:10d}" for size in spent), flush=True)
        if version <= arguments.updates:
            policy.supervised_step(*batch(task, version))
    fresh = Held(policy, precision_map)
    sync(Sender(policy, precision_map, keep=False), Receiver(fresh), 1, "packed", bucket)
    same = {codec: holder.same_as(fresh) for codec, holder in holders.items()}
    print(f"byte for byte what a fresh sampler holds: {same}")
    if not all(same.values()):
        raise SystemExit(1)


def sync(sender: Sender, receiver: Receiver, version: int, codec: str, bucket: int) -> int:
    """One attested sync; the bytes that travelled."""
    root = receiver.held().root
    base = root if codec == "delta" and root is not None and root == sender.kept_root else None
    said = sender.open(f"{codec}-{version}", version, codec, bucket, base)
    receiver.begin(said)
    for _ in range(said.chunks):
        receiver.receive(sender.chunk())
    installed = receiver.end(said.session)
    sent = sender.close()
    attest(sent.digests, installed.digests, codec, version)
    receiver.commit(said.session)
    return sent.nbytes


def batch(task: Task, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts of the recipe, right-padded, all tokens to be predicted but the first."""
    prompts = [list(task.prompts.training(step * ROWS + row).token_ids) for row in range(ROWS)]
    width = max(map(len, prompts))
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    mask = torch.arange(width) < lengths[:, None]
    mask[:, 0] = False
    return tokens, lengths, mask


if __name__ == "__main__":
    main()

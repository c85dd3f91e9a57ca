"""Weight sync: begin -> chunks -> end -> attest, from one learner to the samplers.

The learner quantises its experts and sends the very tensors that a sampler holds (packed codes, block scales, outer
scales; other weights in the model's dtype). The receiver replaces nothing before everything has arrived, then hashes
what it holds; the sender compares. A difference stops the run and names the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from rl.cluster import Remote, wait

CHUNK_BYTES = 64 * 2**20

Manifest = Mapping[str, tuple[str, tuple[int, ...]]]


class AttestationError(RuntimeError):
    """A sampler holds other bytes than the learner sent."""


class WeightSync:
    """Brings every sampler to the learner's current weights.

    Args:
        learner, samplers: the actors.
        precision_map: what the samplers hold; the learner quantises its experts under it.
    """

    def __init__(self, learner: Remote, samplers: Sequence[Remote], precision_map: PrecisionMap):
        self.learner = learner
        self.samplers = list(samplers)
        self.precision_map = precision_map

    def report(self) -> EngineReport:
        layers = len(self.precision_map.layers)
        return EngineReport("weight_sync", self.precision_map, "reference", layers, 0)

    def sync(self, version: int) -> dict[str, Any]:
        """Send the learner's weights as `version`; returns sync/bytes and sync/tensors.

        Raises what the receiver raised (unknown, missing or mis-shaped tensors, stale version, other specification),
        or AttestationError. After any failure before the end the samplers still hold their former weights.
        """
        manifest = self.learner.open_export(self.precision_map)
        begun: list[Remote] = []
        try:
            for sampler in self.samplers:
                sampler.begin_update(version, self.precision_map.fingerprint, manifest)
                begun.append(sampler)
            for names in chunks(manifest, CHUNK_BYTES):
                reference = self.learner.later.export_chunk(names)
                wait([sampler.later.receive(reference) for sampler in self.samplers])
        except BaseException:
            for sampler in begun:
                sampler.abort_update()
            raise
        sent = self.learner.close_export()
        for index, held in enumerate(wait([sampler.later.finish_update() for sampler in self.samplers])):
            attest(sent, held, f"sampler {index}", version)
        return {"sync/bytes": sum(map(_bytes, manifest.values())), "sync/tensors": len(manifest)}


def chunks(manifest: Manifest, limit: int) -> list[list[str]]:
    """Tensor names in order, cut so that a chunk holds at most `limit` bytes; a larger tensor is a chunk of its own."""
    cut: list[list[str]] = []
    filled = 0
    for name, entry in manifest.items():
        size = _bytes(entry)
        if not cut or filled + size > limit:
            cut.append([])
            filled = 0
        cut[-1].append(name)
        filled += size
    return cut


def attest(sent: Mapping[str, str], held: Mapping[str, str], receiver: str, version: int) -> None:
    """Raise AttestationError, naming the tensors, unless the receiver holds exactly what was sent."""
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise AttestationError(
            f"weights version {version}: {receiver} holds other bytes than were sent: {shown}"
        )


def _bytes(entry: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = entry
    return getattr(torch, dtype).itemsize * prod(shape)

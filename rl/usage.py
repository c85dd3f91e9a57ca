"""How fast the stages of an iteration were, and what share that is of what the GPUs can do at most.

Rates are of one rank: of a GPU, or without GPUs of a process. Shares exist only for devices that `rl.devices` has.
Decoding is compared with the bytes that it must read (`rl.preflight.traffic.decode_bytes`), which is an estimate: as
many steps as the longest response has tokens, at the mean length, with routes that are uniform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.precision_map import PrecisionMap
from learner.families.architecture import Architecture
from rl.devices import Device
from rl.flops import forward_flops
from rl.preflight.traffic import decode_bytes
from sampler.config import SamplerConfig

Metrics = dict[str, float]


@dataclass(frozen=True)
class Hardware:
    """What runs a job. learner, sampler: the devices of one rank of each; None: not in `rl.devices`, or no GPU."""

    model: Architecture
    sampler_map: PrecisionMap
    sampler_config: SamplerConfig
    samplers: int  # of `sampler_config.processes` ranks each
    ranks: int  # of the learner
    learner: Device | None
    sampler: Device | None

    def work(self, lengths: torch.Tensor, scored: int) -> Metrics:
        """Of a pass of the learner over sequences of these lengths, int64 [B]. scored: tokens in the loss mask."""
        own = lengths.tolist()
        return {"tokens/learner": sum(own), "work/forward": forward_flops(self.model, own, scored)}

    def usage(self, metrics: Mapping[str, float]) -> Metrics:
        """From the metrics of an iteration, its times and its work among them."""
        found: Metrics = {}
        for stage, passes in (("score", 1), ("update", 3)):
            seconds = metrics.get(f"time/{stage}", 0.0)
            if seconds <= 0 or "work/forward" not in metrics:
                continue
            found[f"rate/{stage}"] = metrics["tokens/learner"] / seconds / self.ranks
            if self.learner is not None:
                done = passes * metrics["work/forward"]
                found[f"usage/{stage}_mfu"] = done / seconds / self.ranks / self.learner.bf16
        seconds = metrics.get("time/generate", 0.0)
        if seconds > 0 and "time/overlapped" not in metrics:  # one step off, that is the time of waiting
            ranks = self.samplers * self.sampler_config.processes
            found["rate/generate"] = metrics["tokens/generated"] / seconds / ranks
            found |= self._decoding(metrics, seconds)
        installing = metrics.get("time/sync_install", 0.0)
        if installing > 0 and self.sampler is not None:
            # Read from where they were staged, and written.
            moved = 2 * metrics["sync/bytes"] / self.sampler_config.processes  # by each rank, about
            found["usage/install_bandwidth"] = moved / installing / self.sampler.bandwidth
        return found

    def _decoding(self, metrics: Mapping[str, float], seconds: float) -> Metrics:
        if self.sampler is None:
            return {}
        own = metrics["tokens/generated"] / self.samplers
        steps = metrics["response/length_max"]
        if "partial/token_budget" in metrics:  # of which earlier iterations may have written a part
            steps = min(steps, metrics["groups/rounds"] * metrics["partial/token_budget"])
        steps = max(steps, own / self.sampler_config.max_num_seqs)
        together = max(1, round(own / steps))
        length = round(metrics["response/length_mean"] / 2)  # of what has been written, halfway
        read = steps * decode_bytes(self.model, self.sampler_map, self.sampler_config, together, length)
        return {
            "usage/decode_bandwidth": read / seconds / self.sampler_config.processes / self.sampler.bandwidth
        }


def expert_load(counts: torch.Tensor) -> Metrics:
    """How evenly tokens are spread. counts: int64 [layers, E], tokens that each expert got.

    Raises ValueError when a layer got none.
    """
    load = counts.double()
    mean = load.mean(1, keepdim=True)
    if bool((mean <= 0).any()):
        raise ValueError(
            f"no token went through layers {(mean.squeeze(1) <= 0).nonzero().flatten().tolist()}"
        )
    relative = load / mean
    return {
        "experts/active": (counts > 0).double().mean().item(),
        "experts/load_max": relative.max().item(),
        "experts/load_cv": relative.std(1, correction=0).mean().item(),
    }

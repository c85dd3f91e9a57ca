"""What moves, and how fast it can at most: the weight sync, decoding, an update."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.precision_map import PrecisionMap
from learner.families.architecture import Architecture
from learner.layout import Layout
from rl.devices import Device
from rl.flops import update_flops
from rl.placement import Spread
from rl.preflight.batch import Batch
from rl.preflight.memory import BYTES, cache_bytes_per_token, expert_bytes
from rl.preflight.parameters import count
from sampler.config import SamplerConfig


@dataclass(frozen=True)
class SyncBytes:
    """Of a whole sync to one sampler."""

    outside: int
    experts: int

    @property
    def total(self) -> int:
        return self.outside + self.experts


def sync_bytes(model: Architecture, specs: PrecisionMap, dtype: str, codec: str) -> SyncBytes:
    """specs: of the samplers; dtype: of the learner's parameters. A delta is never more than `packed`."""
    found = count(model)
    experts = expert_bytes(model, specs, "reference", model.experts).stored
    if codec == "bf16":
        experts = 2 * found.experts
    return SyncBytes(BYTES[dtype] * found.outside, experts)


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes of one whole sync that go from node to node: from the learner's ranks to rank 0, which sends, and from its
    node to samplers on others.
    """

    gathered: int
    sent: int


def node_traffic(
    model: Architecture, layout: Layout, spread: Spread, synced: SyncBytes, transport: str
) -> NodeTraffic:
    """Through Ray's object store a node takes a chunk once, for all its samplers; a process group carries it to each
    rank of each of them, at most. A parameter comes from the first rank that holds it (`learner.layout`).
    """
    home, found = spread.learner[0][0], count(model)
    away = [[spread.learner[rank][0] != home for rank in stage] for stage in _stages(layout)]
    experts = sum(sum(own[: layout.expert]) for own in away) / (layout.pipeline * layout.expert)
    layers = (found.outside - found.embedding - found.output - found.final_norm) / layout.pipeline
    outside = sum(layers * own[0] for own in away) + (found.output + found.final_norm) * away[-1][0]
    gathered = synced.experts * experts + synced.outside * outside / found.outside
    receiving = [node for ranks in spread.samplers for node, _ in ranks if node != home]
    receivers = len(set(receiving)) if transport == "ray" else len(receiving)
    return NodeTraffic(round(gathered), synced.total * receivers)


def _stages(layout: Layout) -> list[range]:
    """The ranks of each stage."""
    return [range(first, first + layout.stage_ranks) for first in range(0, layout.ranks, layout.stage_ranks)]


def experts_read(model: Architecture, sequences: int) -> float:
    """Share of a layer's experts that a decoding step of `sequences` tokens reads under uniform routes."""
    return 1 - (1 - model.experts_per_token / model.experts) ** sequences


def decode_bytes(
    model: Architecture, specs: PrecisionMap, config: SamplerConfig, sequences: int, length: int
) -> float:
    """Bytes that one decoding step must read: weights, of the experts those chosen, and the keys and values of
    `sequences` sequences of `length` tokens. The embedding is looked up.
    """
    found = count(model)
    looked_up = found.embedding if found.output else 0
    outside = BYTES[config.dtype] * (found.outside - looked_up)
    experts = expert_bytes(model, specs, "reference", model.experts).stored
    cache = sequences * length * cache_bytes_per_token(model, config, 1)
    return outside + experts * experts_read(model, sequences) + cache


@dataclass(frozen=True)
class Limits:
    """Bounds, not forecasts: at the device's published rates, with nothing in the way. None without a known device."""

    cache_tokens: int  # that the cache of a sampler holds
    sequences_at_limit: int  # of the greatest length in the cache at once
    decoding: int  # sequences that a sampler decodes at once, at the expected length
    decode_tokens_s: float | None  # of all samplers
    update_s: float | None  # forward and backward of one update over all ranks
    install_s: float | None  # staged weights into their places


def limits(
    model: Architecture,
    specs: PrecisionMap,
    config: SamplerConfig,
    batch: Batch,
    *,
    samplers: int,
    ranks: int,
    device: Device | None,
    synced: SyncBytes,
) -> Limits:
    """ranks: of the learner."""
    tensor = config.tensor_parallel
    cache = int(config.kv_cache_gib * 2**30) // cache_bytes_per_token(model, config, tensor)
    decoding = min(config.max_num_seqs, cache // batch.length, -(-batch.responses_a_round // samplers))
    if device is None:
        return Limits(cache, cache // batch.limit, decoding, None, None, None)
    step = decode_bytes(model, specs, config, max(1, decoding), batch.length) / (device.bandwidth * tensor)
    operations = update_flops(model, [batch.length] * batch.sequences)
    return Limits(
        cache,
        cache // batch.limit,
        decoding,
        samplers * decoding / step,
        operations / (ranks * device.bf16),
        2 * synced.total / tensor / device.bandwidth,
    )

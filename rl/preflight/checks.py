"""What cannot work, with the numbers that say why. Nothing here starts anything or looks at this machine."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.experts import can_stand_in_tiles
from learner.families.architecture import Architecture
from learner.layout import Layout
from rl.config import Config
from rl.preflight.batch import Batch
from rl.preflight.memory import Memory, cache_bytes_per_token
from rl.validate import resolve_maps
from sampler.model_check import HEAD_DIMS, least_cache_tokens

GIB = 2**30


def gib(size: float) -> str:
    """Bytes as GiB, or as MiB where they are few."""
    value = size / GIB
    return (
        f"{value:.0f} GiB"
        if value >= 100
        else f"{value:.1f} GiB"
        if value >= 1
        else f"{value * 1024:.1f} MiB"
    )


def placement_problems(config: Config, layout: Layout) -> Iterator[str]:
    """Ranks that do not fit the GPUs that there are."""
    cluster, samplers, tensor = config.cluster, config.run.samplers, config.sampler.tensor_parallel
    sampling = samplers * tensor
    if not cluster.gpus:
        return
    there = (
        f"{cluster.gpus} GPUs (cluster.nodes={cluster.nodes} x cluster.gpus_per_node={cluster.gpus_per_node})"
    )
    samplers_said = f"run.samplers={samplers} x sampler.tensor_parallel={tensor}"
    if config.learner.device == "cpu":
        yield f"learner.device=cpu: the run is meant for {there}"
    if config.sampler.device == "cpu":
        yield f"sampler.device=cpu: the run is meant for {there}"
    if cluster.placement == "separate" and layout.ranks + sampling != cluster.gpus:
        yield (
            f"cluster.placement=separate: {layout.ranks} ranks of the learner ({layout}) and {sampling} of samplers"
            f" ({samplers_said}) must be {there}"
        )
    if cluster.placement == "colocated":
        if layout.ranks != cluster.gpus:
            yield f"cluster.placement=colocated: {layout.ranks} ranks of the learner ({layout}) must be {there}"
        if sampling > cluster.gpus:
            yield f"{samplers_said}: {sampling} ranks of samplers are more than {there}"
        if config.algorithm.pipeline == "one_step_off":
            yield (
                "algorithm.pipeline=one_step_off: colocated engines take turns; cluster.placement=separate lets both"
                " work at once"
            )
    if tensor > cluster.gpus_per_node:
        yield f"sampler.tensor_parallel={tensor} is more than cluster.gpus_per_node={cluster.gpus_per_node}"
    if layout.tensor > cluster.gpus_per_node:
        yield f"learner.tensor_parallel={layout.tensor} is more than cluster.gpus_per_node={cluster.gpus_per_node}"


def sampler_problems(config: Config, model: Architecture) -> Iterator[str]:
    """What a sampler's ranks cannot share out, and sequences that its cache cannot hold."""
    sampler, tensor = config.sampler, config.sampler.tensor_parallel
    for what, value in (
        ("attention heads", model.heads),
        ("key-value heads", model.kv_heads),
        ("entries of the vocabulary", model.vocab),
        ("experts", model.experts),
    ):
        if value % tensor:
            yield f"sampler.tensor_parallel={tensor} does not divide the model's {value} {what}"
    if sampler.device == "cpu" and model.head_dim not in HEAD_DIMS:
        yield (
            f"sampler.device=cpu: attention heads of {model.head_dim} elements; vLLM's CPU attention takes"
            f" {', '.join(map(str, HEAD_DIMS))}"
        )
    specs = resolve_maps(config.spec, model.layers)[1].layers
    tiled = any(can_stand_in_tiles(model.hidden, model.expert_ffn, spec) for spec in specs)
    if sampler.expert_layout == "tiles" and not tiled:
        yield (
            "sampler.expert_layout=tiles: no layer can stand in tiles, which need 4-bit weights in blocks of 1x16 and"
            f" widths of multiples of 128, got hidden size {model.hidden} and expert FFN width {model.expert_ffn}"
        )
    needed = least_cache_tokens(sampler) * cache_bytes_per_token(model, sampler, tensor)
    if needed > sampler.kv_cache_gib * GIB:
        yield (
            f"sampler.kv_cache_gib={sampler.kv_cache_gib:g}: keys and values of one sequence of sampler.max_model_len="
            f"{sampler.max_model_len} take {gib(needed)}"
        )


def batch_problems(config: Config, batch: Batch) -> Iterator[str]:
    if batch.length > batch.limit:
        yield f"algorithm.expected_length={batch.length} is more than sampler.max_model_len={batch.limit}"


def memory_problems(
    config: Config, learner: Memory, others: dict[str, Memory], sampler: Memory
) -> Iterator[str]:
    """others: models beside the learner on its ranks, by name."""
    there = config.cluster.memory
    if there is None:
        return
    learning = learner.total + sum(memory.total for memory in others.values())
    named = " with ".join(["a rank of the learner", *others])
    where = (
        f"the {gib(there)} of a GPU ({config.cluster.gpu or 'cluster.memory_gib'})"
        if config.cluster.gpus
        else (f"the machine's {gib(there)}")
    )
    if config.cluster.gpus and config.cluster.placement == "separate":
        for who, needed in ((named, learning), ("a rank of a sampler", sampler.total)):
            if needed > there:
                yield f"{who} needs {gib(needed)}, more than {where}"
        return
    samplers = sampler.total * (1 if config.cluster.gpus else config.run.samplers)
    if learning + samplers > there:
        largest = max(
            learner.standing | learner.working, key=lambda name: (learner.standing | learner.working)[name]
        )
        yield (
            f"{named} needs {gib(learning)} (most of it for {largest}) and samplers beside it {gib(samplers)},"
            f" together more than {where}"
        )


def sync_problems(config: Config, synced: int) -> Iterator[str]:
    """synced: bytes of a whole sync. A chunk is a bucket of it."""
    store, chunk = config.run.object_store_mib * 2**20, min(config.sync.bucket_mib * 2**20, synced)
    own = config.cluster.ray_address == "local"  # the store of another Ray is as large as that was told
    if own and config.sync.transport == "ray" and chunk > store:
        yield (
            f"sync.bucket_mib={config.sync.bucket_mib}: a chunk of {gib(chunk)} is more than Ray's object store,"
            f" run.object_store_mib={config.run.object_store_mib}"
        )


def checks(config: Config, model: Architecture, layout: Layout, batch: Batch) -> Iterator[str]:
    """All but what is only counted where these find nothing: memory, and the bytes of a sync."""
    yield from placement_problems(config, layout)
    yield from sampler_problems(config, model)
    yield from batch_problems(config, batch)

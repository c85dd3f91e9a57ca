"""A preflight as text."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.report import names
from rl.placement import Spread, described, groups_over_nodes
from rl.preflight.checks import gib
from rl.preflight.memory import Memory, layer_backend
from rl.preflight.parameters import active
from rl.preflight.run import Preflight
from rl.preflight.traffic import node_traffic


def report(found: Preflight) -> str:
    """A few dozen lines: model, layout, batch, memory, sync and limits."""
    return "\n".join(_lines(found))


def _lines(found: Preflight) -> Iterator[str]:
    config, model, batch = found.config, found.model, found.batch
    parameters = found.parameters
    yield f"{config.run.name}: nothing was started; this is arithmetic on the configuration"
    yield ""
    yield (
        f"model      {parameters.total:,} parameters, {parameters.experts:,} of them in experts; {active(model):,}"
        f" multiply a token ({found.model_source})"
    )
    yield f"learner    {found.learner_map.describe()}"
    if found.sampler_map != found.learner_map:
        yield f"sampler    {found.sampler_map.describe()}"
    yield from _layout(found)
    if config.cluster.nodes > 1:
        yield from _nodes(found)
    yield ""
    yield (
        f"batch      {batch.prompts:,} prompts x {batch.group_size} responses an iteration in"
        f" {_many(batch.updates, 'update')} of {batch.sequences:,} sequences; {batch.drawn_a_round:,} prompts"
        f" ({batch.responses_a_round:,} responses) drawn a round, {batch.rounds} rounds at most"
    )
    if batch.parts > 1:
        yield (
            f"           a response grows by at most {batch.token_budget:,} tokens in a round: {batch.parts} rounds"
            f" for the longest, and so {batch.rounds * batch.parts} at most in an iteration"
        )
    yield (
        f"           {batch.tokens:,} tokens an update at {batch.length:,} a sequence,"
        f" {batch.sequences * batch.limit:,} at most; micro-batches on a rank: {batch.micro_batches}"
        f" of at most {batch.micro_batch_tokens:,} tokens"
    )
    yield ""
    yield from _memory("a rank of the learner", found.learner)
    for name, memory in found.others.items():
        yield from _memory(name, memory)
    yield from _memory("a rank of a sampler", found.sampler)
    yield from _fits(found)
    yield ""
    whole = "at most " if config.sync.codec == "delta" else ""
    yield (
        f"sync       {whole}{found.sync.total:,} bytes ({gib(found.sync.total)}) to each of"
        f" {_many(config.run.samplers, 'sampler')}, codec {config.sync.codec} over {config.sync.transport}:"
        f" experts {gib(found.sync.experts)}, the rest {gib(found.sync.outside)}"
    )
    yield from _limits(found)


def _layout(found: Preflight) -> Iterator[str]:
    config = found.config
    cluster = config.cluster
    if cluster.gpus:
        where = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu or 'GPUs'}, {cluster.placement}"
    else:
        where = "the CPUs of one machine" if cluster.nodes == 1 else f"the CPUs of {cluster.nodes} nodes"
    yield (
        f"layout     {where}: learner on {_many(found.layout.ranks, 'rank')} ({found.layout}),"
        f" {_many(config.run.samplers, 'sampler')} of {_many(config.sampler.tensor_parallel, 'rank')};"
        f" experts by {names(layer_backend(spec, found.backend) for spec in found.learner_map.layers)}"
    )


def _nodes(found: Preflight) -> Iterator[str]:
    config, layout = found.config, found.layout
    cluster, spread = config.cluster, Spread.of(config)
    yield f"nodes      {described(config, [f'node {number}' for number in range(cluster.nodes)])}"
    for number in range(cluster.nodes):
        learning = sum(node == number for node, _ in spread.learner)
        sampling = sum(node == number for ranks in spread.samplers for node, _ in ranks)
        beside = sum(memory.total for memory in found.others.values())
        held = learning * (found.learner.total + beside) + sampling * found.sampler.total
        yield (
            f"           node {number}: {_many(learning, 'rank')} of the learner and {_many(sampling, 'rank')} of"
            f" samplers, together {gib(held)}"
        )
    over = groups_over_nodes(layout, spread.learner)
    said = {
        "EP": "EP (tokens of every expert layer)",
        "PP": "PP (activations between stages)",
        "DP": "DP (gradients and parameters of every update)",
    }
    yield f"           groups over nodes: {', '.join(said[kind] for kind in over) or 'none'}"
    traffic = node_traffic(found.model, layout, spread, found.sync, config.sync.transport)
    yield (
        f"           a sync between nodes: {gib(traffic.gathered)} to rank 0 of the learner, {gib(traffic.sent)} to"
        " samplers"
    )
    if cluster.ray_address == "local":
        yield "           starting it takes a Ray of these nodes: cluster.ray_address=auto, or HOST:PORT"


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}" + "s" * (number != 1)


def _memory(title: str, memory: Memory) -> Iterator[str]:
    yield f"memory of {title}: {gib(memory.total)}"
    for kind, parts in (("", memory.standing), ("while at work: ", memory.working)):
        for name, size in parts.items():
            if size:
                yield f"  {gib(size):>10}  {kind}{name}"


def _fits(found: Preflight) -> Iterator[str]:
    config, there = found.config, found.config.cluster.memory
    if there is None:
        yield "how much memory there is was not said (cluster.gpu or cluster.memory_gib): not checked"
    elif config.cluster.gpus and config.cluster.placement == "separate":
        yield f"each fits the {gib(there)} of a GPU"
    else:
        samplers = 1 if config.cluster.gpus else config.run.samplers
        together = (
            found.learner.total + sum(m.total for m in found.others.values()) + samplers * found.sampler.total
        )
        yield f"together {gib(together)} of {gib(there)}"


def _limits(found: Preflight) -> Iterator[str]:
    bounds, batch = found.limits, found.batch
    yield (
        f"limits     a sampler's cache holds {bounds.cache_tokens:,} tokens: {bounds.sequences_at_limit:,} sequences of"
        f" {batch.limit:,}; {bounds.decoding:,} are decoded at once at {batch.length:,} tokens each"
    )
    if bounds.decode_tokens_s is None or bounds.update_s is None or bounds.install_s is None:
        yield "           rates: none, as the device is not one of rl/devices.py"
        return
    yield (
        f"           bounds by the published rates of {found.config.cluster.gpu}, not forecasts: decoding"
        f" {bounds.decode_tokens_s:,.0f} tokens/s over all samplers (memory), an update {bounds.update_s:.2f} s"
        f" = {batch.tokens / bounds.update_s:,.0f} tokens/s (BF16 products), installing a sync"
        f" {bounds.install_s * 1e3:.2g} ms (memory)"
    )

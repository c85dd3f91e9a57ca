"""Which process of a run is where: nodes, and the GPUs of each. Pure.

GPUs are counted node by node. The learner's ranks take them from the first on; a reference policy and a critic stand
beside the ranks of the learner. Samplers take those behind the learner (`cluster.placement=separate`), or are shared
out evenly over the nodes, on each from its first GPU on (`colocated`). On nodes of CPUs a node takes as many processes
as any other, instead of one a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from learner.layout import Layout
    from rl.config import Config

VISIBLE = "CUDA_VISIBLE_DEVICES"
HOST = "127.0.0.1"
HOST_VARIABLE = "MINITE_HOST"  # tells a process where to listen for those of other processes


@dataclass(frozen=True)
class Node:
    """address: where its processes listen for those of the others, on the network interface `interface`. gpus: those of
    the run, as CUDA_VISIBLE_DEVICES names them. id: Ray's; None: wherever Ray starts a process.
    """

    address: str = HOST
    interface: str = "lo"
    gpus: tuple[str, ...] = ()
    id: str | None = None


@dataclass(frozen=True)
class Place:
    """Of one process. visible: the GPUs that it sees; None: all that there are. local_rank: the GPU that it takes."""

    node: Node = Node()
    local_rank: int = 0
    visible: tuple[str, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables for any process there. Those by which the ranks of a group find each other: `rl.actor_group`."""
        node = self.node
        own = {
            HOST_VARIABLE: node.address,
            "GLOO_SOCKET_IFNAME": node.interface,
            "NCCL_SOCKET_IFNAME": f"={node.interface}",  # NCCL takes a name without = for the beginning of one
        }
        return own if self.visible is None else own | {VISIBLE: ",".join(self.visible)}


HERE = Place()  # on the machine of the driver, where Ray is for it alone

Slot = tuple[int, int]  # the number of a node, and of a GPU (or a process) on it


@dataclass(frozen=True)
class Spread:
    """The slots of every rank of the learner, and of every rank of each sampler."""

    learner: tuple[Slot, ...]
    samplers: tuple[tuple[Slot, ...], ...]

    @classmethod
    def of(cls, config: Config) -> Spread:
        cluster = config.cluster
        return spread(
            cluster.nodes,
            cluster.gpus_per_node,
            config.learner.processes,
            config.run.samplers,
            config.sampler.tensor_parallel,
            separate=cluster.placement == "separate",
        )

    def nodes_of(self, ranks: Sequence[Slot]) -> list[int]:
        return sorted({node for node, _ in ranks})


def gpus_needed(config: Config) -> int:
    """By the engines of a run on GPUs; 0 for one on CPUs."""
    if not config.cluster.gpus:
        return 0
    learning, sampling = config.learner.processes, config.run.samplers * config.sampler.tensor_parallel
    return learning + sampling if config.cluster.placement == "separate" else max(learning, sampling)


def spread(nodes: int, gpus: int, learner: int, samplers: int, each: int, *, separate: bool) -> Spread:
    """gpus: of a node, 0 for nodes of CPUs; learner: its ranks; each: ranks of a sampler. Slots are given out whether
    the nodes have them or not; see `spread_problems`.
    """
    total = learner + samplers * each if separate else learner
    width = gpus or -(-total // nodes)
    ranks = tuple(divmod(rank, width) for rank in range(learner))
    if separate:
        firsts = [divmod(learner + index * each, width) for index in range(samplers)]
    else:
        # As many before node n as the first n of all nodes should have; what does not divide goes to the later ones.
        before = [samplers * node // nodes for node in range(nodes + 1)]
        firsts = [(node, k * each) for node in range(nodes) for k in range(before[node + 1] - before[node])]
    engines = tuple(
        tuple(
            (node + (first + k) // width, (first + k) % width) if gpus else (node, first + k)
            for k in range(each)
        )
        for node, first in firsts
    )
    return Spread(ranks, engines)


def spread_problems(config: Config) -> Iterator[str]:
    """Processes that must be on one node and are not: ranks that cut a layer (tensor parallelism) talk within it."""
    cluster, found = config.cluster, Spread.of(config)
    there = f"cluster.nodes={cluster.nodes} x cluster.gpus_per_node={cluster.gpus_per_node}"
    tensor = config.learner.tensor_parallel
    groups = [found.learner[first : first + tensor] for first in range(0, len(found.learner), tensor)]
    for index, group in enumerate(groups):
        if len(on := found.nodes_of(group)) > 1:
            yield (
                f"learner.tensor_parallel={tensor}: ranks {index * tensor} to {(index + 1) * tensor - 1}, which cut"
                f" layers among them, would be on nodes {on[0]} and {on[-1]} of {there}, and must be on one"
            )
            break
    for index, sampler in enumerate(found.samplers):
        if len(on := found.nodes_of(sampler)) > 1:
            yield (
                f"sampler.tensor_parallel={len(sampler)}: the ranks of sampler {index} would be on nodes {on[0]} and"
                f" {on[-1]} of {there}, and must be on one"
            )
            break


def learner_places(config: Config, nodes: Sequence[Node]) -> tuple[Place, ...]:
    """By rank. Of the GPUs of their node all ranks there see the same ones, those of the learner.

    A Ray of the run's own has one node, whose GPUs they see all.
    """
    slots = Spread.of(config).learner
    here = [[gpu for node, gpu in slots if node == number] for number in range(len(nodes))]
    return tuple(
        Place(nodes[node], gpu, _visible(nodes[node], here[node]) if nodes[node].id else None)
        for node, gpu in slots
    )


def sampler_places(config: Config, nodes: Sequence[Node], index: int) -> tuple[Place, ...]:
    """Of the ranks of sampler `index`. Several samplers have GPUs of their own each. A single one that shares the
    learner's, in a Ray of the run's own, sees them all.
    """
    slots = Spread.of(config).samplers[index]
    node = nodes[slots[0][0]]
    alone = config.cluster.placement == "colocated" and config.run.samplers == 1
    visible = None if alone and node.id is None else _visible(node, [gpu for _, gpu in slots])
    return tuple(Place(node, rank, visible) for rank in range(len(slots)))


def groups_over_nodes(layout: Layout, ranks: Sequence[Slot]) -> list[str]:
    """Kinds of the learner's parallelism with groups of ranks that are not all on one node. ranks: their slots."""
    nodes = [node for node, _ in ranks]
    kinds = {
        "EP": [range(first, first + layout.expert) for first in range(0, layout.ranks, layout.expert)],
        "PP": [range(first, layout.ranks, layout.stage_ranks) for first in range(layout.stage_ranks)],
        "DP": [
            range(first + cut, first + layout.stage_ranks, layout.tensor)
            for first in range(0, layout.ranks, layout.stage_ranks)
            for cut in range(layout.tensor)
        ],
    }
    return [
        kind for kind, groups in kinds.items() if any(len({nodes[r] for r in group}) > 1 for group in groups)
    ]


def described(config: Config, nodes: Sequence[str]) -> str:
    """Ranks and samplers by their nodes, which have these names."""
    found = Spread.of(config)
    learner = [node for node, _ in found.learner]
    samplers = [ranks[0][0] for ranks in found.samplers]
    return f"learner's ranks {_by_node(learner, nodes)}; samplers {_by_node(samplers, nodes)}"


def _by_node(where: Sequence[int], nodes: Sequence[str]) -> str:
    """where: the node of each, in rising order."""
    said = []
    for node in dict.fromkeys(where):
        first, count = where.index(node), where.count(node)
        said.append(f"{first}{f' to {first + count - 1}' if count > 1 else ''} on {nodes[node]}")
    return ", ".join(said)


def _visible(node: Node, gpus: Sequence[int]) -> tuple[str, ...] | None:
    return tuple(node.gpus[gpu] for gpu in gpus) if node.gpus else None

"""The nodes that a run is on: found, held for it, compared with one another before any work, and watched.

A node of a Ray that is there says about itself what no other can: its GPUs, the versions of what is installed on it,
and which folders it sees. Ray manages the GPUs of such a node: a placement group holds them for the run, and which of
them a process sees is then said by CUDA_VISIBLE_DEVICES (`rl.placement`), as engines share GPUs in ways that Ray's
counting of whole GPUs does not know.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from rl.config import Config
from rl.config.cluster import ClusterConfig
from rl.errors import ClusterError, ConfigError, NodeLost, UserError
from rl.placement import HOST, VISIBLE, Node, gpus_needed
from rl.records.provenance import package_versions, source_digest

_ANSWER_S = 5.0  # for a node to take a connection


@dataclass(frozen=True)
class Folders:
    """What all nodes must see: a file that the driver has just made in each folder that is written to, and what the
    folder of the initial policy holds, as names and sizes.
    """

    marks: Mapping[str, Path]  # by the key of the configuration
    model: Path
    content: frozenset[tuple[str, int]]

    def problems(self) -> Iterator[str]:
        """As this machine sees them."""
        for key, mark in self.marks.items():
            if not mark.exists():
                yield f"{mark.parent} is not the folder that the driver sees: {key} must be shared by all nodes"
            elif not os.access(mark.parent, os.W_OK):
                yield f"{mark.parent} cannot be written: {key} must be shared by all nodes"
        if _content(self.model) != self.content:
            yield f"{self.model} does not hold the model that the driver sees there: it must be shared by all nodes"


@dataclass(frozen=True)
class Facts:
    """What a node says about itself. address: Ray's; interfaces: name -> IPv4 address; gpus: those that Ray gives to
    the run; devices: the GPUs that CUDA sees of them; problems: of the folders.
    """

    address: str
    interfaces: Mapping[str, str]
    gpus: tuple[str, ...]
    devices: tuple[str, ...]
    versions: Mapping[str, str]
    source: str
    problems: tuple[str, ...]


def local_node(config: Config) -> Node:
    """This machine, for a Ray of the run's own. Its GPUs are those that this process sees.

    Raises ConfigError where CUDA_VISIBLE_DEVICES names fewer than the run needs (see `rl.validate.check_placement`).
    """
    needed, visible = gpus_needed(config), os.environ.get(VISIBLE)
    if visible is None:
        return Node(gpus=tuple(str(gpu) for gpu in range(needed)))
    known = tuple(gpu for gpu in visible.split(",") if gpu)
    if len(known) < needed:
        raise ConfigError(
            f"{VISIBLE}={visible}: {len(known)} GPUs; with cluster.placement={config.cluster.placement},"
            f" {config.learner.processes} ranks of the learner and run.samplers={config.run.samplers} need {needed}"
        )
    return Node(gpus=known)


def open_nodes(config: Config, run: Path, model: Path) -> list[Node]:
    """The nodes of a run, in the order in which ranks are dealt out to them; of a Ray that is there those that it holds
    for the run until that ends. run: its folder; model: that of its initial policy.

    Raises ClusterError, in one line, when there are too few, or when they differ in what must be the same.
    """
    if config.cluster.ray_address == "local":
        return [local_node(config)]
    written = {"run.output_dir": run}
    if config.model.warm_start.steps:
        written["run.cache_dir"] = Path(config.run.cache_dir).absolute()
    with _marks(written) as marks:
        facts = ask_nodes(config.cluster, Folders(marks, model.absolute(), _content(model)))
    if problems := list(node_problems(config.cluster, facts)):
        raise ClusterError("; ".join(problems))
    return [as_node(config.cluster, ray_id, said) for ray_id, said in facts.items()]


def ask_nodes(cluster: ClusterConfig, folders: Folders) -> dict[str, Facts]:
    """What the nodes that Ray holds for the run say, by Ray's id: the driver's first, the others by address.

    Raises ClusterError when Ray has not as many within `cluster.patience_s`, or when one does not answer.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    each = {"GPU": cluster.gpus_per_node} if cluster.gpus_per_node else {"CPU": 1}
    held = placement_group([each] * cluster.nodes, strategy="STRICT_SPREAD")
    if not held.wait(cluster.patience_s):
        remove_placement_group(held)
        raise ClusterError(_too_few(cluster, ray.nodes()))
    where = placement_group_table(held)["bundles_to_node_id"]
    asked = ray.remote(
        num_cpus=each.get("CPU", 0),
        num_gpus=each.get("GPU", 0),
        max_calls=1,  # the process, which may have loaded CUDA, ends
    )(describe)
    calls = {
        where[bundle]: asked.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(held, bundle)
        ).remote(folders)
        for bundle in range(cluster.nodes)
    }
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    found = {}
    for ray_id, call in calls.items():
        try:
            found[ray_id] = ray.get(call)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ClusterError(
                f"node {addresses[ray_id]}: cannot start a process of the run: {reason}"
            ) from error
    own = ray.get_runtime_context().get_node_id()
    return dict(sorted(found.items(), key=lambda item: (item[0] != own, _numbers(item[1].address))))


def describe(folders: Folders) -> Facts:
    """The machine on which Ray runs this."""
    import psutil
    import ray

    gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
    devices: tuple[str, ...] = ()
    if gpus:
        import torch

        devices = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    interfaces = {
        name: own.address
        for name, addresses in psutil.net_if_addrs().items()
        for own in addresses
        if own.family == socket.AF_INET
    }
    address = ray.util.get_node_ip_address()
    problems = tuple(folders.problems())
    return Facts(address, interfaces, gpus, devices, package_versions(), source_digest(), problems)


def node_problems(cluster: ClusterConfig, nodes: Mapping[str, Facts]) -> Iterator[str]:
    """What keeps nodes from working on one run, each of them compared with the first. Pure."""
    first, *_ = nodes.values()
    for node in nodes.values():
        name = f"node {node.address}"
        if len(node.gpus) != len(node.devices):
            yield f"{name}: Ray counts {len(node.gpus)} GPUs there for the run, and CUDA sees {len(node.devices)}"
        elif set(node.devices) != set(first.devices):
            yield f"{name} has {node.devices[0]}, node {first.address} {first.devices[0]}: they must be of one kind"
        differing = [
            f"{package} {node.versions.get(package, 'missing')} (there {first.versions.get(package, 'missing')})"
            for package in sorted({*node.versions, *first.versions})
            if node.versions.get(package) != first.versions.get(package)
        ]
        if differing:
            yield f"{name} has other packages than node {first.address}: {', '.join(differing)}"
        elif node.source != first.source:
            yield f"{name} has another source of miniTE than node {first.address}, though its version is the same"
        if cluster.nodes > 1 and _interface(cluster, node) is None:
            there = ", ".join(f"{key} {address}" for key, address in node.interfaces.items())
            yield (
                f"{name}: cluster.interface={cluster.interface} must be one of {there}"
                if cluster.interface
                else f"{name}: none of its interfaces ({there}) has that address: cluster.interface must name one"
            )
        yield from (f"{name}: {problem}" for problem in node.problems)


def as_node(cluster: ClusterConfig, ray_id: str, said: Facts) -> Node:
    """Where its processes listen: on one node among themselves; on several on the network between them."""
    if cluster.nodes == 1:
        return Node(gpus=said.gpus, id=ray_id)
    name = _interface(cluster, said)
    assert name is not None  # `node_problems`
    return Node(said.interfaces[name] if cluster.interface else said.address, name, said.gpus, ray_id)


@contextmanager
def watched(nodes: Sequence[Node]) -> Iterator[None]:
    """An error inside which comes from the death of a node is NodeLost, which says so in one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        check_alive(nodes, error)
        raise


def check_alive(nodes: Sequence[Node], cause: Exception | None = None) -> None:
    """Raises NodeLost, from `cause`, when a node of a Ray that is there is not there any more."""
    if all(node.id is None for node in nodes):
        return
    import ray

    there = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    lost = [node.address for node in nodes if node.id and not _answers(there.get(node.id))]
    if lost:
        raise NodeLost(
            f"node {', '.join(lost)} is gone, with the processes of the run that were there"
        ) from cause


def _answers(node: dict[str, Any] | None) -> bool:
    """Ray needs a while to notice a death; whoever listens no more is dead already."""
    if node is None:
        return False
    with suppress(OSError):
        address = (node["NodeManagerAddress"], node["NodeManagerPort"])
        socket.create_connection(address, timeout=_ANSWER_S).close()
        return True
    return False


def _interface(cluster: ClusterConfig, node: Facts) -> str | None:
    if cluster.interface is not None:
        return cluster.interface if cluster.interface in node.interfaces else None
    loopback = node.address.startswith("127.")  # all of which the loopback interface has
    wanted = HOST if loopback else node.address
    return next((name for name, address in node.interfaces.items() if address == wanted), None)


def _too_few(cluster: ClusterConfig, nodes: Sequence[dict[str, Any]]) -> str:
    alive = sorted(
        (
            (node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
            for node in nodes
            if node["Alive"]
        ),
        key=lambda node: _numbers(node[0]),
    )
    there = ", ".join(f"{address} with {gpus} GPUs" for address, gpus in alive)
    needed = f"{cluster.gpus_per_node} GPUs" if cluster.gpus_per_node else "a CPU"
    return (
        f"cluster.nodes={cluster.nodes}: Ray has not so many nodes with {needed} free on each, after"
        f" cluster.patience_s={cluster.patience_s:g} seconds; alive: {there}"
    )


def _numbers(address: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in address.split(".")]


def _content(folder: Path) -> frozenset[tuple[str, int]]:
    if not folder.is_dir():
        return frozenset()
    return frozenset((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())


@contextmanager
def _marks(folders: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    with ExitStack() as stack:
        marks = {}
        for key, folder in folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            marks[key] = Path(stack.enter_context(NamedTemporaryFile(prefix=".nodes-", dir=folder)).name)
        yield marks

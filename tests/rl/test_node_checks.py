"""What nodes say about themselves, compared: which of them differs, and in what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rl.config.cluster import ClusterConfig
from rl.nodes import Facts, Folders, as_node, check_alive, node_problems
from rl.placement import Node

ETH = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}
HEAD = Facts("10.0.0.1", ETH, ("0", "1"), ("NVIDIA H200",) * 2, {"torch": "2.13.0"}, "digest", ())
OTHER = replace(HEAD, address="10.0.0.2", interfaces=ETH | {"eth0": "10.0.0.2"})
CLUSTER = ClusterConfig(nodes=2, gpus_per_node=2, ray_address="auto")


def problems(other: Facts, cluster: ClusterConfig = CLUSTER) -> list[str]:
    return list(node_problems(cluster, {"a": HEAD, "b": other}))


def test_nodes_that_are_alike_have_no_problems():
    assert problems(OTHER) == []
    assert as_node(CLUSTER, "b", OTHER) == Node("10.0.0.2", "eth0", ("0", "1"), "b")


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        (
            {"devices": ("NVIDIA H200",)},
            "node 10.0.0.2: Ray counts 2 GPUs there for the run, and CUDA sees 1",
        ),
        ({"devices": ("NVIDIA B200",) * 2}, "node 10.0.0.2 has NVIDIA B200, node 10.0.0.1 NVIDIA H200: "),
        (
            {"versions": {"torch": "2.12.0"}},
            "node 10.0.0.2 has other packages than node 10.0.0.1: torch 2.12.0 ",
        ),
        ({"versions": {"torch": "2.13.0", "vllm": "1"}}, "vllm 1 (there missing)"),
        ({"source": "another"}, "node 10.0.0.2 has another source of miniTE than node 10.0.0.1"),
        (
            {"interfaces": {"lo": "127.0.0.1"}},
            "none of its interfaces (lo 127.0.0.1) has that address: ",
        ),
        ({"problems": ("/run is not there",)}, "node 10.0.0.2: /run is not there"),
    ],
)
def test_the_node_that_differs_is_named(differs: dict[str, object], said: str):
    [problem] = problems(replace(OTHER, **differs))  # type: ignore[arg-type]
    assert said in problem


def test_a_named_interface_is_where_processes_listen():
    cluster = replace(CLUSTER, interface="ib0")
    other = replace(OTHER, interfaces=OTHER.interfaces | {"ib0": "192.168.0.2"})
    assert as_node(cluster, "b", other) == Node("192.168.0.2", "ib0", ("0", "1"), "b")
    [problem] = problems(other, cluster)
    assert problem == "node 10.0.0.1: cluster.interface=ib0 must be one of lo 127.0.0.1, eth0 10.0.0.1"


def test_a_single_node_keeps_to_itself():
    assert as_node(replace(CLUSTER, nodes=1), "a", HEAD) == Node("127.0.0.1", "lo", ("0", "1"), "a")
    check_alive([Node()])  # a Ray of the run's own is not asked


def test_folders_that_are_not_the_same(tmp_path: Path):
    run, model = tmp_path / "run", tmp_path / "model"
    run.mkdir()
    model.mkdir()
    (model / "config.json").write_text("{}")
    (run / "mark").touch()
    seen = Folders({"run.output_dir": run / "mark"}, model, frozenset({("config.json", 2)}))
    assert list(seen.problems()) == []
    (run / "mark").unlink()
    (model / "config.json").write_text("{ }")
    first, second = seen.problems()
    assert (
        first == f"{run} is not the folder that the driver sees: run.output_dir must be shared by all nodes"
    )
    assert second.startswith(f"{model} does not hold the model")

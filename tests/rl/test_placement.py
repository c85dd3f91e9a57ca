"""Which process is on which node, and which GPUs it sees: by rules that hold for any layout, and by example."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.compose import load_config
from rl.errors import ConfigError
from rl.nodes import local_node
from rl.placement import (
    HOST,
    VISIBLE,
    Node,
    Place,
    gpus_needed,
    learner_places,
    sampler_places,
    spread,
    spread_problems,
)
from rl.validate import check_placement

SEPARATE = ["+recipe=h200_smollm2", "cluster.placement=separate", "sync.transport=process_group"]
COLOCATED = ["+recipe=minite"]


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, int | bool]:
    """Of GPUs that are all taken: by the learner, beside whom samplers are, or by both."""
    nodes, gpus, each = draw(st.integers(1, 5)), draw(st.integers(1, 8)), draw(st.integers(1, 4))
    separate, there = draw(st.booleans()), nodes * gpus
    most = there // each - (separate and there % each == 0)
    samplers = draw(st.integers(0, max(0, most)))
    learner = there - samplers * each if separate else there
    return dict(nodes=nodes, gpus=gpus, learner=learner, samplers=samplers, each=each, separate=separate)


@given(layouts())
def test_every_gpu_has_its_rank_of_the_learner_and_no_two_samplers_share_one(layout):
    found = spread(**layout)
    sampling = list(chain(*found.samplers))
    assert len(found.learner) == layout["learner"] and len(sampling) == layout["samplers"] * layout["each"]
    assert list(found.learner) == sorted(set(found.learner))
    if layout["separate"]:
        everywhere = [(node, gpu) for node in range(layout["nodes"]) for gpu in range(layout["gpus"])]
        assert sorted([*found.learner, *sampling]) == everywhere
    elif all(len(found.nodes_of(ranks)) == 1 for ranks in found.samplers):
        assert len(set(sampling)) == len(sampling)
        counts = [sum(ranks[0][0] == node for ranks in found.samplers) for node in range(layout["nodes"])]
        assert max(counts) - min(counts) <= 1


@given(layouts(), st.integers(1, 8))
def test_ranks_that_cut_layers_share_a_node_wherever_their_number_divides_its_gpus(layout, tensor):
    found = spread(**layout)
    for first in range(0, len(found.learner) - tensor + 1, tensor):
        if layout["gpus"] % tensor == 0:
            assert len(found.nodes_of(found.learner[first : first + tensor])) == 1
    if layout["gpus"] % layout["each"] == 0 and layout["learner"] % layout["each"] == 0:
        assert all(len(found.nodes_of(ranks)) <= 1 for ranks in found.samplers)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 6), st.integers(1, 3), st.booleans())
def test_nodes_of_cpus_take_as_many_processes_each(nodes, learner, samplers, each, separate):
    found = spread(nodes, 0, learner, samplers, each, separate=separate)
    assert all(0 <= node < nodes for node, _ in [*found.learner, *chain(*found.samplers)])
    counts = [sum(node == number for node, _ in found.learner) for number in range(nodes)]
    assert max(counts) <= -(-(learner + separate * samplers * each) // nodes)
    assert all(len(found.nodes_of(ranks)) == 1 for ranks in found.samplers)


def nodes(count: int, gpus: int) -> list[Node]:
    return [
        Node(f"10.0.0.{n}", "eth0", tuple(f"{n}-{gpu}" for gpu in range(gpus)), id=f"node{n}")
        for n in range(count)
    ]


def seen(place: Place) -> tuple[str, int, str]:
    return place.node.address, place.local_rank, place.environment[VISIBLE]


def test_two_nodes_that_learner_and_samplers_share():
    config = load_config(
        [*COLOCATED, "cluster.nodes=2", "cluster.gpus_per_node=2", "learner.data_parallel=4"]
    )
    there = nodes(2, 2)
    assert [seen(place) for place in learner_places(config, there)] == [
        ("10.0.0.0", 0, "0-0,0-1"),
        ("10.0.0.0", 1, "0-0,0-1"),
        ("10.0.0.1", 0, "1-0,1-1"),
        ("10.0.0.1", 1, "1-0,1-1"),
    ]
    three = load_config(
        [
            *COLOCATED,
            "cluster.nodes=2",
            "cluster.gpus_per_node=2",
            "learner.data_parallel=4",
            "run.samplers=3",
        ]
    )
    assert [seen(sampler_places(three, there, index)[0]) for index in range(3)] == [
        ("10.0.0.0", 0, "0-0"),
        ("10.0.0.1", 0, "1-0"),
        ("10.0.0.1", 0, "1-1"),
    ]


def test_two_nodes_of_which_samplers_have_their_own_part():
    config = load_config(
        [
            *COLOCATED,
            "cluster.placement=separate",
            "cluster.nodes=2",
            "cluster.gpus_per_node=4",
            "learner.data_parallel=4",
            "sampler.tensor_parallel=2",
            "run.samplers=2",
        ]
    )
    there = nodes(2, 4)
    assert [seen(place)[:2] for place in learner_places(config, there)] == [
        ("10.0.0.0", gpu) for gpu in range(4)
    ]
    found = [seen(place) for index in range(2) for place in sampler_places(config, there, index)]
    assert found == [("10.0.0.1", k % 2, "1-0,1-1" if k < 2 else "1-2,1-3") for k in range(4)]
    environment = sampler_places(config, there, 1)[0].environment
    assert environment["MINITE_HOST"] == "10.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0" and environment["NCCL_SOCKET_IFNAME"] == "=eth0"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [
                "cluster.nodes=3",
                "cluster.gpus_per_node=6",
                "learner.tensor_parallel=4",
                "learner.data_parallel=4",
            ],
            "learner.tensor_parallel=4: ranks 4 to 7, which cut layers among them, would be on nodes 0 and 1",
        ),
        (
            [
                "cluster.placement=separate",
                "cluster.nodes=2",
                "cluster.gpus_per_node=4",
                "learner.data_parallel=3",
                "sampler.tensor_parallel=2",
                "run.samplers=2",
            ],
            "sampler.tensor_parallel=2: the ranks of sampler 0 would be on nodes 0 and 1",
        ),
    ],
)
def test_ranks_that_must_be_together_and_are_not(overrides: list[str], said: str):
    [problem] = spread_problems(load_config([*COLOCATED, *overrides]))
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("overrides", "visible", "expected"),
    [
        ([*SEPARATE, "cluster.gpus_per_node=2"], None, ["1"]),
        ([*SEPARATE, "cluster.gpus_per_node=3", "run.samplers=2"], None, ["1", "2"]),
        (
            [*SEPARATE, "cluster.gpus_per_node=4", "learner.data_parallel=2", "run.samplers=2"],
            "4,5,6,7",
            ["6", "7"],
        ),
        (COLOCATED, None, list("01234567")),
        (
            [*SEPARATE, "cluster.gpus_per_node=5", "run.samplers=2", "sampler.tensor_parallel=2"],
            None,
            ["1,2", "3,4"],
        ),
        ([*COLOCATED, "run.samplers=4", "sampler.tensor_parallel=2"], None, ["0,1", "2,3", "4,5", "6,7"]),
        ([*COLOCATED, "learner.data_parallel=2", "run.samplers=2"], "GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
    ],
)
def test_on_this_machine_several_samplers_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], visible: str | None, expected: list[str]
):
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    config = load_config(overrides)
    node = local_node(config)
    found = [sampler_places(config, [node], index) for index in range(config.run.samplers)]
    assert [place.environment[VISIBLE] for [place, *_] in found] == expected
    assert all(VISIBLE not in place.environment for place in learner_places(config, [node]))
    assert node.address == HOST and node.interface == "lo"


def test_others_see_what_the_run_sees():
    for overrides in (["+recipe=h200_smollm2"], ["+recipe=tiny"], ["+recipe=tiny", "run.samplers=2"]):
        config = load_config(overrides)
        [place] = sampler_places(config, [local_node(config)], config.run.samplers - 1)
        assert place.visible is None and VISIBLE not in place.environment


@pytest.mark.parametrize(
    "overrides",
    [[*SEPARATE, "cluster.gpus_per_node=2"], [*COLOCATED, "learner.data_parallel=2", "run.samplers=2"]],
)
@pytest.mark.parametrize(("visible", "count"), [("", 0), ("3", 1)])
def test_a_run_never_starts_without_its_gpus(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], visible: str, count: int
):
    monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(ConfigError, match=rf"CUDA_VISIBLE_DEVICES={visible}: {count} GPUs; .* need 2$"):
        local_node(load_config(overrides))


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (COLOCATED, 8),
        ([*SEPARATE, "cluster.gpus_per_node=4", "learner.data_parallel=2", "run.samplers=2"], 4),
        ([*SEPARATE, "cluster.gpus_per_node=5", "run.samplers=2", "sampler.tensor_parallel=2"], 5),
        (["+recipe=h200_smollm2", "sync.transport=ray"], 1),
    ],
)
def test_a_start_counts_the_gpus_that_there_are(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], needed: int
) -> None:
    config = load_config(overrides)
    assert gpus_needed(config) == needed
    monkeypatch.setattr(torch.cuda, "device_count", lambda: needed)
    check_placement(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: needed - 1)
    with pytest.raises(ConfigError, match=rf"need {needed} GPUs, and {needed - 1} can be seen"):
        check_placement(config)


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (["cluster.gpus_per_node=4"], 8),
        (["learner.data_parallel=16", "cluster.nodes=1"], 16),
        (["cluster.nodes=2", "cluster.gpus_per_node=2", "learner.data_parallel=4", "run.samplers=8"], 8),
        (["cluster.placement=separate"], 16),
    ],
)
def test_a_start_in_a_ray_that_is_there_needs_the_gpus_that_it_asks_for(
    overrides: list[str], needed: int
) -> None:
    config = load_config([*COLOCATED, "cluster.ray_address=auto", *overrides])
    said = rf"need {needed} GPUs, and {config.cluster.gpus} are in cluster.nodes={config.cluster.nodes} x "
    with pytest.raises(ConfigError, match=said):
        check_placement(config)


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for key in ("learner.device", "sampler.device"):
        config = load_config(["+recipe=tiny", f"{key}=cuda"])
        with pytest.raises(ConfigError, match=f"^{key}=cuda: no GPU can be seen$"):
            check_placement(config)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        check_placement(config)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("transport", ["ray", "process_group"])
def test_without_gpus_none_are_needed(transport: str) -> None:
    config = load_config(["+recipe=tiny", "run.samplers=2", f"sync.transport={transport}"])
    assert gpus_needed(config) == 0
    check_placement(config)


def test_a_start_refuses_what_the_plan_refuses_of_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for transport, reason in (("cuda_ipc", "on the same GPU"), ("process_group", "NCCL refuses")):
        with pytest.raises(ConfigError, match=f"sync.transport={transport}: .*{reason}"):
            check_placement(load_config([*COLOCATED, f"sync.transport={transport}"]))
    check_placement(load_config(["+recipe=h200_smollm2"]))

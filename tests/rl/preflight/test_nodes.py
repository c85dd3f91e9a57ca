"""A plan over several nodes: what is on which, and what goes between them."""

from __future__ import annotations

import pytest

from rl.compose import load_config
from rl.placement import Spread
from rl.preflight.report import report
from rl.preflight.run import preflight
from rl.preflight.traffic import node_traffic


def planned(nodes: int, *overrides: str):
    ranks = 8 * nodes
    sizes = [f"cluster.nodes={nodes}", f"learner.data_parallel={ranks}", f"run.samplers={ranks}"]
    return preflight(load_config(["+recipe=minite", *sizes, *overrides]))


def traffic(found):
    config = found.config
    return node_traffic(found.model, found.layout, Spread.of(config), found.sync, config.sync.transport)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_what_rank_0s_node_holds_whole_comes_from_nowhere_else(nodes: int):
    found = planned(nodes)
    assert traffic(found).gathered == 0
    assert traffic(found).sent == (nodes - 1) * found.sync.total  # Ray hands a chunk to a node once


def test_experts_shared_out_over_two_nodes_come_half_from_the_other():
    found = planned(2, "learner.expert_parallel=16")
    assert traffic(found).gathered == found.sync.experts // 2
    assert "groups over nodes: EP (tokens of every expert layer), DP" in report(found)


def test_the_second_of_two_stages_comes_from_the_other_node_whole():
    found = planned(2, "learner.pipeline_parallel=2", "learner.data_parallel=8")
    assert found.sync.experts / 2 < traffic(found).gathered < found.sync.total / 2 + found.sync.outside / 2
    assert "groups over nodes: PP (activations between stages)\n" in report(found)


def test_a_process_group_carries_it_to_each_sampler():
    found = planned(
        2,
        "cluster.placement=separate",
        "learner.data_parallel=8",
        "run.samplers=8",
        "sync.transport=process_group",
    )
    assert traffic(found).sent == 8 * found.sync.total
    text = report(found)
    assert "learner's ranks 0 to 7 on node 0; samplers 0 to 7 on node 1" in text
    assert "node 1: 0 ranks of the learner and 8 ranks of samplers" in text
    two = planned(
        2,
        "cluster.placement=separate",
        "learner.data_parallel=8",
        "run.samplers=4",
        "sampler.tensor_parallel=2",
        "sync.transport=process_group",
    )
    assert traffic(two).sent == traffic(found).sent  # every rank of a sampler takes all of it
    assert "cluster.ray_address=auto" in text and "nodes  " not in report(planned(1))

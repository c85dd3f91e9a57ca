"""Rates, shares of what a device can do, and how tokens spread over experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from learner.replay import RouteReplay, take_load
from rl.compose import load_config
from rl.devices import DEVICES
from rl.flops import update_flops
from rl.metrics import numbers
from rl.preflight.model import planned_architecture
from rl.usage import Hardware, expert_load
from sampler.config import SamplerConfig

MODEL, _ = planned_architecture(load_config(["+recipe=minite"]))
HARDWARE = Hardware(
    model=MODEL,
    sampler_map=PrecisionMap.resolve(MODEL.layers, named_spec("minite")),
    sampler_config=SamplerConfig(dtype="bfloat16", max_num_seqs=64),
    samplers=2,
    ranks=4,
    learner=DEVICES["h200"],
    sampler=DEVICES["h200"],
)
ITERATION = {
    "time/generate": 10.0,
    "time/score": 2.0,
    "time/update": 5.0,
    "time/sync_install": 0.01,
    "tokens/generated": 40_000.0,
    "sync/bytes": 12e9,
    "response/length_max": 2000.0,
    "response/length_mean": 1000.0,
}


def iteration() -> dict[str, float]:
    return ITERATION | HARDWARE.work(torch.tensor([1000, 500, 500]), scored=1600)


def test_rates_are_tokens_by_time_and_rank():
    found = HARDWARE.usage(iteration())
    assert found["rate/generate"] == 40_000 / 10 / 2
    assert found["rate/score"] == 2000 / 2 / 4
    assert found["rate/update"] == 2000 / 5 / 4
    assert numbers(found) == found  # every name is in the table


def test_shares_are_of_the_published_rates():
    found = HARDWARE.usage(iteration())
    operations = update_flops(MODEL, [1000, 500, 500], 1600)
    assert found["usage/update_mfu"] == pytest.approx(operations / (5 * 4 * 989.4e12))
    assert found["usage/score_mfu"] == pytest.approx(operations / 3 / (2 * 4 * 989.4e12))
    assert found["usage/install_bandwidth"] == pytest.approx(24e9 / 0.01 / 4.8e12)


def test_decoding_that_reads_all_experts_in_every_step_is_bound_from_below():
    """20,000 tokens a sampler in 2,000 steps: ten sequences at once, which take at most 80 of 128 experts a layer."""
    share = HARDWARE.usage(iteration())["usage/decode_bandwidth"]
    weights = 15.34 * 2**30 + 2 * (1.54e9 - 151936 * 2048)
    assert 0 < share < 2000 * (weights + 10 * 1000 * 98304) / 10 / 4.8e12
    assert share > 2000 * 2 * 1.2e9 / 10 / 4.8e12


def test_parts_of_responses_take_as_many_steps_as_their_rounds():
    """Four rounds of 250 tokens: 1,000 steps of twenty sequences, as if the longest response had 1,000 tokens."""
    parts = {"groups/rounds": 4.0, "partial/token_budget": 250.0}
    found, expected = (HARDWARE.usage(iteration() | own) for own in (parts, {"response/length_max": 1000.0}))
    assert found["usage/decode_bandwidth"] == expected["usage/decode_bandwidth"]
    many = parts | {"groups/rounds": 99.0}
    assert HARDWARE.usage(iteration() | many) == HARDWARE.usage(iteration())


def test_an_unknown_device_has_rates_and_no_shares():
    found = replace(HARDWARE, learner=None, sampler=None).usage(iteration())
    assert found.keys() == {"rate/generate", "rate/score", "rate/update"}


def test_time_of_waiting_is_no_time_of_sampling():
    assert "rate/generate" not in HARDWARE.usage(iteration() | {"time/overlapped": 3.0})


def test_load_of_experts():
    even = expert_load(torch.full((3, 4), 5))
    assert even == {"experts/active": 1.0, "experts/load_max": 1.0, "experts/load_cv": 0.0}
    found = expert_load(torch.tensor([[8, 0, 0, 0], [2, 2, 2, 2]]))
    assert found["experts/active"] == 5 / 8
    assert found["experts/load_max"] == 4.0
    assert found["experts/load_cv"] == pytest.approx(3**0.5 / 2)
    with pytest.raises(ValueError, match=r"layers \[1\]"):
        expert_load(torch.tensor([[1, 1], [0, 0]]))


def test_routers_count_what_they_take_until_they_are_asked():
    replays = [RouteReplay(), RouteReplay()]
    assert take_load(replays) is None
    own = torch.tensor([[0, 1], [2, 1]])
    for replay in replays:
        replay.choose(own, 3)
    replays[1].routes = torch.tensor([[0, 2], [-1, -1]])
    assert replays[1].choose(own, 3).tolist() == [[0, 2], [2, 1]]
    load = take_load(replays)
    assert load is not None
    assert load.tolist() == [[1, 2, 1], [2, 3, 3]]
    assert take_load(replays) is None

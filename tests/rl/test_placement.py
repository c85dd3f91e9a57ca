"""Which GPUs a sampler sees, and whether there are enough."""

from __future__ import annotations

import pytest
import torch

from rl.compose import load_config
from rl.engines import sampler_environment
from rl.errors import ConfigError
from rl.validate import check_placement, gpus_needed

SEPARATE = ["+recipe=h200_smollm2", "cluster.placement=separate", "sync.transport=process_group"]
COLOCATED = ["+recipe=minite"]
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("overrides", "visible", "seen"),
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
        ([*COLOCATED, "run.samplers=2"], "GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
    ],
)
def test_several_samplers_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], visible: str | None, seen: list[str]
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    config = load_config(overrides)
    found = [sampler_environment(config, index) for index in range(config.run.samplers)]
    assert found == [{VISIBLE: gpu} for gpu in seen]


def test_others_see_what_the_run_sees() -> None:
    assert sampler_environment(load_config(["+recipe=h200_smollm2"]), 0) == {}
    assert sampler_environment(load_config(["+recipe=tiny"]), 0) == {}
    assert sampler_environment(load_config(["+recipe=tiny", "run.samplers=2"]), 1) == {}


@pytest.mark.parametrize(
    "overrides", [[*SEPARATE, "cluster.gpus_per_node=2"], [*COLOCATED, "run.samplers=2"]]
)
@pytest.mark.parametrize(("visible", "count"), [("", 0), ("3", 1)])
def test_a_sampler_never_starts_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], visible: str, count: int
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    config = load_config(overrides)
    with pytest.raises(ConfigError, match=rf"CUDA_VISIBLE_DEVICES={visible}: {count} GPUs; .* need 2$"):
        sampler_environment(config, config.run.samplers - 1)


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

"""Which GPUs a sampler sees."""

from __future__ import annotations

import pytest

from rl.compose import load_config
from rl.engines import sampler_environment

SEPARATE = ["+recipe=h200_smollm2", "cluster.placement=separate", "sync.transport=process_group"]
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("overrides", "visible", "seen"),
    [
        (["cluster.gpus_per_node=2"], None, ["1"]),
        (["cluster.gpus_per_node=3", "run.samplers=2"], None, ["1", "2"]),
        (["cluster.gpus_per_node=4", "learner.data_parallel=2", "run.samplers=2"], "4,5,6,7", ["6", "7"]),
    ],
)
def test_separate_samplers_have_the_gpus_behind_the_learner(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], visible: str | None, seen: list[str]
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    config = load_config([*SEPARATE, *overrides])
    assert [sampler_environment(config, index) for index in range(len(seen))] == [
        {VISIBLE: gpu} for gpu in seen
    ]


def test_others_see_what_the_run_sees() -> None:
    assert sampler_environment(load_config(["+recipe=h200_smollm2"]), 0) == {}
    assert sampler_environment(load_config(["+recipe=tiny"]), 0) == {}

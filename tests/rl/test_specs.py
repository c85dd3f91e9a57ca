"""The comparison of what the engines report, and the rules between a configuration and its model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from kernels.report import EngineReport
from learner.families.architecture import Architecture
from rl.compose import load_config
from rl.errors import ConfigError, SpecMismatch
from rl.specs import check_experts_ran, check_specifications
from rl.validate import check_against_model, prompt_limit, resolve_maps

MODEL = Architecture(
    layers=4,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    experts=8,
    experts_per_token=2,
    expert_ffn=64,
    vocab=14,
    max_positions=64,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=False,
    qk_norm=True,
    renormalize_router=True,
)


def report(engine: str, calls: int = 1, **overrides: object) -> EngineReport:
    precision_map = PrecisionMap.resolve(4, named_spec("minite", overrides))
    return EngineReport(engine, precision_map, "reference", 4, calls)


def test_equal_specifications_pass_and_are_printed():
    [line] = check_specifications([report("megatron"), report("vllm"), report("weight_sync")], False)
    fingerprint = report("vllm").precision_map.fingerprint
    assert line == (
        "execution specification of megatron, vllm, weight_sync:"
        f" minite {named_spec('minite').fingerprint} in layers 0 to 3; precision map {fingerprint}"
    )


def test_one_field_that_differs_stops_and_is_named_with_both_values():
    reports = [report("megatron"), report("vllm", weight={"outer_domain": "expert"})]
    with pytest.raises(SpecMismatch) as mismatch:
        check_specifications(reports, False)
    message = str(mismatch.value)
    assert "megatron and vllm" in message
    [row] = [line.split() for line in message.splitlines() if line.startswith("weight.outer_domain")]
    assert row[1:3] == ["row", "expert"]
    lines = check_specifications(reports, allow_difference=True)
    assert [line.split()[3] for line in lines] == ["megatron:", "vllm:"]
    assert " minite[weight.outer_domain=expert] " in lines[1]


def test_expert_layers_that_never_ran_are_an_error():
    check_experts_ran([report("megatron"), report("vllm"), report("weight_sync", calls=0)])
    with pytest.raises(RuntimeError, match="vllm never ran"):
        check_experts_ran([report("megatron"), report("vllm", calls=0)])


@pytest.mark.parametrize(
    "overrides, model, named",
    [
        ([], {"hidden": 120}, "hidden size 120"),
        ([], {"expert_ffn": 40}, "expert FFN width 40"),
        (["sampler.max_model_len=65"], {}, "sampler.max_model_len=65"),
        (["algorithm.sampling.max_tokens=32"], {}, "algorithm.sampling.max_tokens=32"),
        (["learner.micro_batch_tokens=16"], {}, "learner.micro_batch_tokens=16"),
        (["sampler.dtype=bfloat16"], {}, "sampler.dtype=bfloat16"),
        (["sampler.stock=true"], {}, "spec.allow_difference=true asks for that"),
        (
            ["sampler.stock=true", "spec.allow_difference=true", "algorithm.routing_replay=r3"],
            {},
            "does not say which experts it chose",
        ),
        (
            [
                "sampler.stock=true",
                "spec.allow_difference=true",
                "+spec.sampler.weight.outer_domain=expert",
            ],
            {},
            "a stock engine takes no specification",
        ),
        (["sampler.sleep=discard", "algorithm.pipeline=one_step_off"], {}, "sampler.sleep=discard"),
        (["learner.offload=true", "algorithm.pipeline=one_step_off"], {}, "learner.offload=true"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name(
    overrides: list[str], model: dict[str, int], named: str
):
    with pytest.raises(ConfigError) as refusal:
        check_against_model(load_config(["+recipe=tiny", *overrides]), replace(MODEL, **model))
    assert named in str(refusal.value)


def test_what_fits_passes_and_widths_only_bind_quantised_experts():
    check_against_model(load_config(["+recipe=tiny"]), MODEL)
    check_against_model(load_config(["+recipe=tiny", "spec=bf16"]), replace(MODEL, hidden=120))


def test_prompts_leave_room_for_the_response():
    config = load_config(["+recipe=tiny", "sampler.max_model_len=30", "algorithm.sampling.max_tokens=8"])
    assert prompt_limit(config) == 22


def test_each_engine_has_its_own_map():
    config = load_config(
        ["+recipe=tiny", "+spec.sampler.weight.outer_domain=expert", "spec.last_layers_bf16=1"]
    )
    learner, sampler = resolve_maps(config.spec, 4)
    assert [spec.name for spec in learner.layers] == ["minite", "minite", "minite", "bf16"]
    assert sampler.layers[0].weight.outer_domain == "expert"
    assert sampler.layers[3] == learner.layers[3]


@pytest.mark.parametrize("override", ["spec.name=fp3", "+spec.sampler.colour=red", "spec.last_layers_bf16=9"])
def test_specifications_that_do_not_exist_are_refused(override: str):
    with pytest.raises(ConfigError, match="spec"):
        resolve_maps(load_config(["+recipe=tiny", override]).spec, 4)

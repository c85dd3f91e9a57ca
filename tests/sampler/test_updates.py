"""The weight update protocol on live engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels.digest import tensor_digest
from sampler.config import SamplingConfig
from sampler.engine import Completion, Sampler
from sampler.weights import TensorSpec
from tests.sampler.conftest import (
    FAMILIES,
    MakeModel,
    MakeSampler,
    StartSampler,
    gap,
    prompts,
    reference_logp,
)
from tests.sampler.wire import wire_tensors

SAMPLING = SamplingConfig(max_tokens=8)
GATE = "model.layers.1.mlp.gate.weight"
CODES = "model.layers.0.experts.w13.codes"
Tensors = dict[str, torch.Tensor]


def manifest(tensors: Tensors) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


def update(sampler: Sampler, tensors: Tensors) -> dict[str, str]:
    """In chunks of five tensors, whose memory the sender then reuses; returns the digests of what is held."""
    sampler.begin_update(sampler.version + 1, sampler.precision_map.fingerprint, manifest(tensors))
    names = list(tensors)
    for start in range(0, len(names), 5):
        chunk = {name: tensors[name].clone() for name in names[start : start + 5]}
        sampler.receive(chunk)
        for tensor in chunk.values():
            tensor.zero_()
    return sampler.finish_update()


def respond(sampler: Sampler) -> list[list[Completion]]:
    return sampler.generate(prompts(), [[i, i + 100] for i in range(6)], SAMPLING)


@pytest.mark.parametrize("spec", ["fp32", "minite"])
@pytest.mark.parametrize("family", FAMILIES)
def test_update_there_and_back(
    family: str,
    spec: str,
    sampler_for: MakeSampler,
    start_sampler: StartSampler,
    model_folder: MakeModel,
) -> None:
    """Digests of what was sent, then bit for bit what engines started from those weights write."""
    sampler = sampler_for(family, spec)
    old, new = (wire_tensors(model_folder(family, seed), sampler.precision_map) for seed in (0, 1))
    before, version = respond(sampler), sampler.version

    assert update(sampler, new) == {name: tensor_digest(tensor) for name, tensor in new.items()}
    after = respond(sampler)
    assert {c.version for own in after for c in own} == {version + 1}
    started = start_sampler(model_folder(family, 1), sampler.precision_map)
    assert respond(started) == with_version(after, 0)
    if spec == "fp32":
        model = AutoModelForCausalLM.from_pretrained(model_folder(family, 1)).eval()
        assert gap(after, reference_logp(model, prompts(), after)).max() < 2e-5

    assert update(sampler, old) == {name: tensor_digest(tensor) for name, tensor in old.items()}
    assert with_version(respond(sampler), version) == before


def with_version(responses: list[list[Completion]], version: int) -> list[list[Completion]]:
    return [[replace(completion, version=version) for completion in own] for own in responses]


@pytest.fixture
def sampler(sampler_for: MakeSampler) -> Iterator[Sampler]:
    sampler = sampler_for("qwen3_moe", "minite")
    yield sampler
    sampler.abort_update()


@pytest.fixture
def tensors(sampler: Sampler, model_folder: MakeModel) -> Tensors:
    return wire_tensors(model_folder("qwen3_moe", 1), sampler.precision_map)


def _without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


MANIFESTS: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (_without(GATE), rf"{GATE} is missing"),
    (lambda t: {**t, "model.extra": t[GATE]}, r"model.extra is unknown"),
    (lambda t: {**t, GATE: t[GATE].bfloat16()}, rf"{GATE} is bfloat16 .* expected float32 \[8, 64\]"),
    (lambda t: {**t, CODES: t[CODES][:, :-1]}, rf"{CODES} is uint8 .* expected uint8 \[8, 64, 32\]"),
]


@pytest.mark.parametrize(("change", "message"), MANIFESTS)
def test_manifests_that_do_not_fit(
    change: Callable[[Tensors], Tensors], message: str, sampler: Sampler, tensors: Tensors
) -> None:
    fingerprint = sampler.precision_map.fingerprint
    with pytest.raises(ValueError, match=message):
        sampler.begin_update(sampler.version + 1, fingerprint, manifest(change(tensors)))
    respond(sampler)  # no update is open


def test_stale_version_and_other_specification(sampler: Sampler, tensors: Tensors) -> None:
    fingerprint, version = sampler.precision_map.fingerprint, sampler.version
    with pytest.raises(ValueError, match=rf"version {version} is not newer than {version}"):
        sampler.begin_update(version, fingerprint, manifest(tensors))
    with pytest.raises(ValueError, match=rf"precision map 0123456789abcdef, .* {fingerprint}"):
        sampler.begin_update(version + 1, "0123456789abcdef", manifest(tensors))


CHUNKS: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (lambda t: {"model.extra": t[GATE]}, r"model.extra is unknown"),
    (lambda t: {"model.norm.weight": t["model.norm.weight"]}, r"model.norm.weight came twice"),
    (lambda t: {GATE: t[GATE].double()}, rf"{GATE} is float64"),
    (lambda t: {GATE: t[GATE].T}, rf"{GATE} is float32 \[64, 8\], expected float32 \[8, 64\]"),
]


@pytest.mark.parametrize(("chunk", "message"), CHUNKS)
def test_refused_chunks_stage_nothing(
    chunk: Callable[[Tensors], Tensors], message: str, sampler: Sampler, tensors: Tensors
) -> None:
    before = respond(sampler)
    sampler.begin_update(sampler.version + 1, sampler.precision_map.fingerprint, manifest(tensors))
    sampler.receive({"model.norm.weight": tensors["model.norm.weight"]})
    with pytest.raises(ValueError, match=message):
        sampler.receive({CODES: tensors[CODES], **chunk(tensors)})
    sampler.receive({CODES: tensors[CODES]})  # was not staged
    with pytest.raises(ValueError, match=rf"incomplete: .*{'model.embed_tokens.weight'} did not come"):
        sampler.finish_update()
    sampler.abort_update()
    assert respond(sampler) == before


def test_nothing_runs_while_an_update_is_open(sampler: Sampler, tensors: Tensors) -> None:
    before = respond(sampler)
    fingerprint = sampler.precision_map.fingerprint
    sampler.begin_update(sampler.version + 1, fingerprint, manifest(tensors))
    sampler.receive(tensors)
    for call in (lambda: respond(sampler), lambda: sampler.score([[1, 2]], [1])):
        with pytest.raises(RuntimeError, match="a weight update is open"):
            call()
    with pytest.raises(RuntimeError, match=r"still open"):
        sampler.begin_update(sampler.version + 2, fingerprint, manifest(tensors))
    sampler.abort_update()
    for call in (sampler.finish_update, lambda: sampler.receive(tensors)):
        with pytest.raises(RuntimeError, match="no weight update is open"):
            call()
    assert respond(sampler) == before

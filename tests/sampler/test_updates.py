"""A weight sync into live engines; the protocol itself is tested in tests/rl/sync."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels.digest import fast_digests
from kernels.experts import ExpertWeights, StoredLayout, derived_name, wire_name
from kernels.precision_map import PrecisionMap
from kernels.reference import prepare
from rl.sync.codecs.base import live_bytes, whole
from rl.sync.protocol import Announcement, Chunk, RefusedError, make_chunk, manifest_of
from rl.sync.receiver import Receiver
from sampler.config import SamplingConfig
from sampler.engine import Completion, Sampler
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


def announcement(
    sampler: Sampler, tensors: Tensors, chunks: int, layout: StoredLayout | None = None
) -> Announcement:
    """layout: of the sampler unless another is given."""
    fingerprint = sampler.precision_map.fingerprint
    version, layout = sampler.version + 1, layout or sampler.weights.layout
    return Announcement(
        "s", version, fingerprint, "packed", manifest_of(tensors), None, chunks, 2**30, layout
    )


def chunk_of(tensors: Tensors, number: int) -> Chunk:
    return make_chunk("s", number, [whole(name, tensor) for name, tensor in tensors.items()])


def update(sampler: Sampler, tensors: Tensors) -> dict[str, int]:
    """In chunks of five tensors; returns the digests of what is held."""
    receiver = Receiver(sampler.weights)
    names = list(tensors)
    starts = range(0, len(names), 5)
    receiver.begin(announcement(sampler, tensors, len(starts)))
    for number, start in enumerate(starts):
        receiver.receive(chunk_of({name: tensors[name] for name in names[start : start + 5]}, number))
    installed = receiver.end("s")
    receiver.commit("s")
    return installed.digests


def expected_digests(tensors: Tensors, precision_map: PrecisionMap) -> dict[str, int]:
    """Of the tensors, and of what an engine derives from them."""
    derived: Tensors = {}
    for layer, spec in enumerate(precision_map.layers):
        prefix = wire_name(layer, "")
        stored = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        parts = prepare(ExpertWeights.from_tensors(stored, spec), spec).derived()
        derived |= {derived_name(layer, part): tensor for part, tensor in parts.items()}
    return fast_digests({**tensors, **derived})


def respond(sampler: Sampler) -> list[list[Completion]]:
    return sampler.generate(prompts(), [[i, i + 100] for i in range(6)], SAMPLING)


@pytest.mark.parametrize(
    ("family", "spec"), [*itertools.product(FAMILIES, ("fp32", "minite")), ("qwen3_moe", "strict")]
)
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
    places = addresses(sampler)

    assert update(sampler, new) == expected_digests(new, sampler.precision_map)
    after = respond(sampler)
    assert {written_by for own in after for c in own for written_by in c.versions} == {version + 1}
    started = start_sampler(model_folder(family, 1), sampler.precision_map)
    assert respond(started) == with_version(after, 0)
    if spec == "fp32":
        model = AutoModelForCausalLM.from_pretrained(model_folder(family, 1)).eval()
        assert gap(after, reference_logp(model, prompts(), after)).max() < 2e-5

    assert update(sampler, old) == expected_digests(old, sampler.precision_map)
    assert addresses(sampler) == places
    assert with_version(respond(sampler), version) == before


def addresses(sampler: Sampler) -> dict[str, int]:
    """Of everything that an update writes, live and derived."""
    derived = {
        f"{layer}.{part}": tensor
        for layer, method in sampler._experts.items()
        for part, tensor in method.prepared().derived().items()
    }
    return {name: tensor.data_ptr() for name, tensor in {**sampler.weights.tensors(), **derived}.items()}


def with_version(responses: list[list[Completion]], version: int) -> list[list[Completion]]:
    return [[replace(c, versions=(version,) * len(c.versions)) for c in own] for own in responses]


def test_nothing_runs_while_an_update_is_open(sampler_for: MakeSampler, model_folder: MakeModel) -> None:
    sampler = sampler_for("qwen3_moe", "minite")
    tensors = wire_tensors(model_folder("qwen3_moe", 1), sampler.precision_map)
    before, version = respond(sampler), sampler.version
    receiver = Receiver(sampler.weights)
    receiver.begin(announcement(sampler, tensors, 2))
    receiver.receive(chunk_of(tensors, 0))
    for call in (lambda: respond(sampler), lambda: sampler.score([[1, 2]], [1])):
        with pytest.raises(
            RuntimeError, match=f"nothing is generated: the sync of weights version {version + 1} is open"
        ):
            call()
    receiver.abort()
    assert respond(sampler) == before


MANIFESTS: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (lambda t: {name: tensor for name, tensor in t.items() if name != GATE}, rf"{GATE} is missing"),
    (lambda t: {**t, "model.extra": t[GATE]}, r"model.extra is unknown"),
    (lambda t: {**t, GATE: t[GATE].bfloat16()}, rf"{GATE} is bfloat16 .* expected float32 \[8, 64\]"),
    (lambda t: {**t, CODES: t[CODES][:, :-1]}, rf"{CODES} is uint8 .* expected uint8 \[8, 64, 32\]"),
]


@pytest.mark.parametrize(("change", "message"), MANIFESTS)
def test_manifests_that_do_not_fit(
    change: Callable[[Tensors], Tensors], message: str, sampler_for: MakeSampler, model_folder: MakeModel
) -> None:
    sampler = sampler_for("qwen3_moe", "minite")
    tensors = wire_tensors(model_folder("qwen3_moe", 1), sampler.precision_map)
    with pytest.raises(RefusedError, match=message):
        Receiver(sampler.weights).begin(announcement(sampler, change(tensors), 1))
    respond(sampler)  # no update is open


def test_every_live_tensor_can_be_written_in_place(sampler_for: MakeSampler) -> None:
    for family in FAMILIES:
        for name, tensor in sampler_for(family, "minite").weights.tensors().items():
            assert live_bytes(tensor).data_ptr() == tensor.data_ptr(), name

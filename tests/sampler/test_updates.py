"""A weight sync into live engines; the protocol itself is tested in tests/rl/sync."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels.digest import fast_digests
from kernels.experts import ExpertWeights, StoredLayout, derived_name, wire_name
from kernels.precision_map import PrecisionMap
from kernels.reference import prepare
from kernels.routing import NO_ROUTE
from rl.data.problem import Problem
from rl.data.prompts import Prompt
from rl.partial import PartialGroup, begin, grown, joined, requests
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
PARTS = SamplingConfig(max_tokens=12, temperature=0.9, stop_token_ids=(5, 11))
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


def write_on(sampler: Sampler, groups: list[PartialGroup], samplers: int = 1) -> list[PartialGroup]:
    """Every unfinished response by up to 5 tokens, in as many calls as there would be samplers."""
    asked = requests(groups, lambda position, k: 100 * position + k, PARTS.max_tokens, 5)
    answers: list[list[Completion]] = [[] for _ in asked]
    for one in range(samplers):
        share = asked[one::samplers]
        arguments = [r.tokens for r in share], [r.seeds for r in share], PARTS, [r.limit for r in share]
        answers[one::samplers] = sampler.generate(*arguments)
    return grown(groups, itertools.chain.from_iterable(answers), PARTS.max_tokens)


@pytest.mark.parametrize(("spec", "bound"), [("fp32", 2e-5), ("strict", 0.0)])
def test_responses_that_other_weights_go_on_with(
    spec: str, bound: float, sampler_for: MakeSampler, model_folder: MakeModel
) -> None:
    """Three parts, the second by another model. After each, `score` of all that is written: it is the log-probability
    of the tokens by the weights that are there, and of no other tokens.
    """
    sampler = sampler_for("qwen3_moe", spec)
    tensors = [wire_tensors(model_folder("qwen3_moe", seed), sampler.precision_map) for seed in (0, 1)]
    first = sampler.version
    problem = Problem("p", "q", "a", "s")
    groups = [begin(Prompt(n, problem, tuple(own)), 2) for n, own in enumerate(prompts())]
    for part in range(3):
        if part:
            update(sampler, tensors[part % 2])
        begun, groups = groups, write_on(sampler, groups)
        if spec == "strict":
            assert write_on(sampler, begun, samplers=3) == groups
        rows = [(group.prompt.token_ids, own) for group in groups for own in group.completions]
        scores = sampler.score(
            [[*prompt, *own.token_ids] for prompt, own in rows],
            [len(prompt) for prompt, _ in rows],
            PARTS.temperature,
        )
        written = torch.tensor([value for _, own in rows for value in own.logp])
        distance = (written - torch.tensor([value for own in scores for value in own])).abs()
        versions = torch.tensor([version for _, own in rows for version in own.versions])
        assert versions.unique().tolist() == [first + n for n in range(part + 1)]
        same = (versions - first) % 2 == part % 2
        assert distance[same].max() <= bound
        assert not part or distance[~same].median() > 0.01
    assert {len(own.token_ids) for _, own in rows} > {12}  # all of it, and some that met a stop token
    for _, own in rows:
        assert own.finish_reason == ("stop" if own.token_ids[-1] in PARTS.stop_token_ids else "length")


def test_experts_of_a_response_that_other_weights_go_on_with(
    sampler_for: MakeSampler, model_folder: MakeModel
) -> None:
    """Each row is that of a fresh prefill of the sequence by the weights that wrote the token behind it."""
    sampler = sampler_for("qwen3_moe", "fp32")
    tensors = [wire_tensors(model_folder("qwen3_moe", seed), sampler.precision_map) for seed in (0, 1)]
    prompt, sampling = prompts()[3], replace(PARTS, return_routes=True, stop_token_ids=())
    [[part]] = sampler.generate([prompt], [[1]], sampling, [5])
    update(sampler, tensors[1])
    [[rest]] = sampler.generate([[*prompt, *part.token_ids]], [[2]], sampling, [4])
    whole = joined(part, rest, 9)
    sequence, cut = [*prompt, *whole.token_ids], len(prompt) + 5 - 1
    [[later]] = sampler.generate([sequence], [[3]], sampling, [1])
    update(sampler, tensors[0])
    [[earlier]] = sampler.generate([sequence], [[3]], sampling, [1])
    expected = np.concatenate([earlier.routes[:cut], later.routes[cut : len(sequence) - 1]])
    assert np.array_equal(whole.routes[:-1], expected)
    assert (whole.routes[-1] == NO_ROUTE).all()
    assert not np.array_equal(earlier.routes[: len(sequence) - 1], later.routes[: len(sequence) - 1])


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

"""Faults planted in the real vLLM engine, and what a diagnosis against the real Megatron engine says of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import backends, reference
from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from kernels.spec import ExecutionSpec
from learner.config import LearnerConfig
from rl.diagnose import main
from rl.diagnosis.boundaries import LayerResult, examine
from rl.diagnosis.corpus import Corpus
from rl.diagnosis.masters import Masters
from rl.diagnosis.megatron import MegatronEngine
from rl.diagnosis.verdict import summary_of
from rl.diagnosis.vllm import VllmEngine
from sampler.config import SamplerConfig
from tests.rl.in_process import engines_in_process, leave_groups
from tests.rl.tiny_chat import make_model

pytestmark = pytest.mark.slow

LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts get zeros in the first 16 features: a block of zeros in every row."""
    folder = make_model(tmp_path_factory.mktemp("faults") / "model", initializer_range=0.1)
    state = load_file(folder / "model.safetensors")
    for name, tensor in state.items():
        if name.endswith("post_attention_layernorm.weight"):
            tensor[:16] = 0.0
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(2, 258, (n,), generator=generator).tolist() for n in (24, 31, 17)]
    return Corpus(tuple(map(tuple, sequences)), (8, 9, 5), (0, 1, 2))


@pytest.fixture(scope="module")
def learner(folder: Path) -> MegatronEngine:
    return MegatronEngine(folder, uniform("minite"), LearnerConfig(threads=1))


@pytest.fixture(scope="module")
def sampler(folder: Path) -> VllmEngine:
    config = SamplerConfig(
        max_model_len=64, max_num_seqs=8, max_num_batched_tokens=256, kv_cache_gib=1 / 64, threads=1
    )
    engine = VllmEngine(folder, uniform("minite"), config)
    leave_groups(engine.sampler)
    return engine


@pytest.fixture(autouse=True)
def healthy(learner: MegatronEngine, sampler: VllmEngine) -> Iterator[None]:
    """Both engines as they should be, before and after."""
    yield
    for method in sampler.sampler.experts.values():
        vars(method).pop("_kernels", None)
    for engine in (learner, sampler):
        engine.use(uniform("bf16"))
        engine.use(uniform("minite"))


def uniform(name: str, **overrides: object) -> PrecisionMap:
    return PrecisionMap.resolve(LAYERS, named_spec(name, overrides))


def compute_as(sampler: VllmEngine, layer: int, spec: ExecutionSpec) -> None:
    """A back end that computes a layer under `spec`, whatever spec it is asked for and says it runs."""
    method = sampler.sampler.experts[layer]
    masters = sampler.masters(layer)

    def forward(
        x: Any, ids: Any, p: Any, prepared: Any, asked: ExecutionSpec, guard: Any = None
    ) -> torch.Tensor:
        return reference.forward(x, ids, p, reference.prepare(weights, spec), spec, guard)

    weights = backends.REFERENCE.quantize(*masters, spec)
    faulty = replace(backends.REFERENCE, forward=forward)
    vars(method)["_kernels"] = lambda: faulty


@pytest.fixture
def diagnose(
    learner: MegatronEngine, sampler: VllmEngine, corpus: Corpus, folder: Path
) -> Callable[[], list[LayerResult]]:
    masters = Masters(folder, "float32")
    return lambda: examine(learner, sampler, corpus, 1.0, range(LAYERS), masters)


Diagnose = Callable[[], list[LayerResult]]


def test_healthy_engines_are_equal_on_the_same_input(diagnose: Diagnose):
    results = diagnose()
    assert [result.first for result in results] == [None, None]
    assert not any(result.deviations or result.diff for result in results)
    assert [result.logp["max"] for result in results] == [0.0, 0.0]
    assert "equal bit for bit" in summary_of(results)


ZERO_RULE = {"activation.zero_block": "a=0:s=1"}
# What is planted -> the first part and boundary that differ, and the field that is responsible
SPEC_FAULTS = {
    "zero rule": (ZERO_RULE, "FC1 input", "quantised operands", "activation.zero_block"),
    "no cast to bf16 behind FC1": ({"fc1_output": "fp32"}, "fc1", "expert outputs", "fc1_output"),
    "no cast to bf16 behind SwiGLU": ({"swiglu_output": "fp32"}, "swiglu", "expert outputs", "swiglu_output"),
    "router coefficient ahead of FC2": (
        {"router_position": "swiglu_before_cast"},
        "swiglu",
        "expert outputs",
        "router_position",
    ),
}


@pytest.mark.parametrize("overrides, part, boundary, field", SPEC_FAULTS.values(), ids=SPEC_FAULTS.keys())
def test_a_field_that_differs_is_named_with_the_boundary(
    overrides: dict, part: str, boundary: str, field: str, sampler: VllmEngine, diagnose: Diagnose
):
    """The sampler says what it runs: the specs differ in one field."""
    sampler.use(uniform("minite", **overrides))
    first = diagnose()[0]
    assert (first.first, first.boundary) == (part, boundary)
    assert [f.field for f in first.fields] == [field]
    assert not first.deviations
    assert f"{field}:" in summary_of([first])


@pytest.mark.parametrize("overrides, part, boundary, field", SPEC_FAULTS.values(), ids=SPEC_FAULTS.keys())
def test_an_engine_that_does_not_compute_what_it_says_is_found_out(
    overrides: dict, part: str, boundary: str, field: str, sampler: VllmEngine, diagnose: Diagnose
):
    """The specs are equal; layer 1 of the sampler computes another."""
    compute_as(sampler, 1, named_spec("minite", overrides))
    clean, first = diagnose()
    assert clean.first is None
    assert (first.first, first.boundary) == (part, boundary)
    assert not first.diff
    [deviation] = first.deviations
    assert deviation.engine == "right (vllm)"
    assert any(f"as if {field} were {overrides[field]}" in one for one in deviation.named)
    verdict = summary_of([clean, first])
    assert f"Layer 1: the engines part at the {boundary}, in {part}" in verdict
    assert f"as if {field} were" in verdict and "Both engines say" not in verdict


def test_a_stale_outer_scale_of_one_expert(sampler: VllmEngine, diagnose: Diagnose):
    method = sampler.sampler.experts[1]
    method.weights.tensors()["w13.outer_scales"][2].mul_(1.5)
    method.weights_changed()
    first = diagnose()[1]
    assert (first.first, first.boundary) == ("w13", "quantised operands")
    [deviation] = first.deviations
    assert deviation.named == ("w13.outer_scales of expert 2 is not that of the master weights",)
    assert "Layer 1: the engines part at the quantised operands, in w13" in summary_of([first])
    assert (
        "right (vllm) engine does not compute its own spec in w13: w13.outer_scales of expert 2"
        in summary_of([first])
    )


def test_derived_tensors_that_are_one_version_behind(sampler: VllmEngine, diagnose: Diagnose):
    method = sampler.sampler.experts[0]
    method.prepared()
    held = method._prepared
    method._prepared = replace(held, w2=replace(held.w2, outer_scales=held.w2.outer_scales * 1.5))
    first = diagnose()[0]
    assert (first.first, first.boundary) == ("fc2", "expert outputs")
    [deviation] = first.deviations
    assert "w2.outer_scales" in deviation.named[0] and "stale" in deviation.named[0]
    assert "stale" in summary_of([first])


def test_gate_and_up_swapped(sampler: VllmEngine, diagnose: Diagnose):
    w13, w2 = sampler.masters(0)
    gate, up = w13.chunk(2, dim=1)
    sampler.sampler.experts[0].hold(torch.cat((up, gate), dim=1), w2, named_spec("minite"))
    first = diagnose()[0]
    assert (first.first, first.boundary) == ("w13", "quantised operands")
    [deviation] = first.deviations
    assert deviation.named == ("gate and up are swapped in w13",)
    assert "gate and up are swapped in w13" in summary_of([first])


def test_a_bf16_layer_that_should_be_nvfp4(sampler: VllmEngine, diagnose: Diagnose):
    sampler.use(PrecisionMap.resolve(LAYERS, named_spec("minite"), last_layers_bf16=1))
    clean, first = diagnose()
    assert clean.first is None
    assert (first.layer, first.first, first.boundary) == (1, "w13", "quantised operands")
    assert {"activation", "weight"} <= {f.field for f in first.diff}
    assert "weight" in {f.field for f in first.fields}
    assert first.logp["p99"] > 0
    assert not first.deviations
    verdict = summary_of([clean, first])
    assert verdict.startswith("Layer 1: the engines part at the quantised operands, in w13")
    assert "weight: e2m1/1x16 against none" in verdict and "in 1 of the 2 layers" in verdict


def test_a_field_of_one_side_of_a_strict_model_is_named_from_the_command_line(
    folder: Path,
    corpus: Corpus,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """The expert layers are equal: what differs is outside them."""
    (tmp_path / "sequences.json").write_text(corpus.to_json())
    rows = [{"id": str(n), "problem": f"{n}+{n}?", "answer": str(2 * n)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": "folder",
        "model.path": folder,
        "data": "file",
        "data.path": tmp_path / "rows.jsonl",
        "data.held_out": 1,
        "sequences": tmp_path / "sequences.json",
        "prompts": 3,
        "engines": "[megatron,vllm]",
        "spec": "strict",
        "+spec.sampler.model.rotary": "bf16",
        "conditions": "[strict,spec]",
        "sampled_under": "strict",
        "study": "[frozen,boundaries,attribution]",
        "resamples": 50,
        "run.output_dir": tmp_path / "outputs",
        "run.cache_dir": tmp_path / "cache",
        "learner.threads": 1,
        "sampler.threads": 1,
        "sampler.max_model_len": 64,
        "sampler.max_num_seqs": 8,
        "sampler.max_num_batched_tokens": 256,
        "sampler.kv_cache_gib": 1 / 64,
        "algorithm.sampling.max_tokens": 8,
    }
    with engines_in_process():
        assert main([f"{key}={value}" for key, value in values.items()]) == 0
    [results] = (tmp_path / "outputs" / "diagnose").glob("*/results.json")
    found = json.loads(results.read_text())
    gaps = {gap["label"]: gap["statistics"]["max"]["value"] for gap in found["gaps"]}
    assert gaps["strict"] == 0.0 < gaps["spec"]
    verdicts = {verdict["label"]: verdict["text"] for verdict in found["verdicts"]}
    assert all("equal bit for bit" in text for text in verdicts.values())
    assert "model." not in verdicts["strict"] and verdicts["spec"].endswith(
        "model.rotary: fp32 against bf16."
    )
    assert found["attribution"]["start_p99"] == 0.0
    for way in ("forwards", "backwards"):
        [step] = found["attribution"][way]
        assert step["fields"] == ["model.rotary: fp32 -> bf16"] and step["p99"] > 0
    assert "model.rotary: fp32 against bf16" in capsys.readouterr().out

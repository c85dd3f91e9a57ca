"""The parts of a diagnosis that need no engine, and one diagnosis from the command line with two real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import TORCH_TYPE, ExpertWeights
from kernels.layer_input import LayerShape, synthetic_layer
from kernels.precision_map import PrecisionMap
from kernels.reference import expert_rows, prepare
from kernels.routing import Routing
from kernels.spec import spec_diff
from rl.compose import load_extended
from rl.diagnose import main
from rl.diagnosis.boundaries import LayerResult
from rl.diagnosis.compare import compare
from rl.diagnosis.config import DiagnoseConfig
from rl.diagnosis.corpus import Corpus
from rl.diagnosis.engine import Given
from rl.diagnosis.figures import draw_all
from rl.diagnosis.hf import HfEngine
from rl.diagnosis.plan import make_plan
from rl.diagnosis.reference import alternatives, changes_values, reference_trace
from rl.diagnosis.statistics import Bootstrap, Bounds
from rl.diagnosis.store import Store
from rl.diagnosis.studies import depths, path
from rl.diagnosis.summary import Summary, other_backends
from rl.diagnosis.verdict import summary_of
from rl.errors import DataError
from tests.rl.in_process import engines_in_process
from tests.rl.tiny_chat import byte_tokenizer, make_model

CORPUS = Corpus(((5, 6, 7, 8), (9, 10, 11, 12, 13, 14), (5, 6, 9)), (2, 2, 1), (0, 0, 1))


@pytest.mark.parametrize(
    "left, right",
    [("minite", "te_per_tensor"), ("bf16", "minite"), ("te_exact", "vllm_cuda"), ("minite", "mxfp8")],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_a_path_takes_every_field_once_in_as_few_at_a_time_as_can_be(left: str, right: str, backwards: bool):
    a, b = named_spec(left), named_spec(right)
    steps = path(a, b, backwards)
    assert steps[-1].spec == b
    taken = [one.field for step in steps for one in step.fields]
    assert sorted(taken) == sorted(one.field for one in spec_diff(a, b))
    before = a
    for step in steps:  # each step changes its own fields and no other
        assert {one.field for one in spec_diff(before, step.spec)} == {one.field for one in step.fields}
        before = step.spec
    if {left, right} == {
        "minite",
        "te_per_tensor",
    }:  # a gradient's quantiser needs the backward that takes it
        assert sorted(map(len, (step.fields for step in steps)))[-2:] == [1, 2]


def test_forwards_and_backwards_differ_in_order_alone():
    a, b = named_spec("minite"), named_spec("minite_expert")
    assert [s.fields for s in path(a, b)] == [s.fields for s in path(a, b, True)][::-1]
    assert path(a, a) == []


def test_a_move_that_also_changes_the_back_end_is_noted():
    def piece(*backends: str) -> tuple[dict, dict]:
        return {"backends": list(backends)}, {}

    steps = [
        {"direction": direction, "fields": [{"field": field}], "column": column}
        for direction, field, column in (
            ("forwards", "a", "right_1"),
            ("forwards", "b", "right_2"),
            ("backwards", "b", "right_3"),
            ("backwards", "a", "right_2"),
        )
    ]
    own = {"right_0": "kernels", "right_1": "kernels", "right_2": "reference", "right_3": "reference"}
    pieces = {
        "scale": {
            "base": piece("kernels", "kernels"),
            "base/a": piece("kernels", "kernels"),
            "base/b": piece("kernels", "reference"),
        },
        "attribution": {"left/right": ({"start": "right_0", "steps": steps, "backends": own}, {})},
    }
    [note] = other_backends(pieces, "base", {"a:1": "base/a", "b:1": "base/b"})
    assert note.partition(": ")[2] == (
        "scale, b:1: from kernels to reference; attribution forwards, b: from kernels to reference;"
        " attribution backwards, b: from kernels to reference."
    )
    assert other_backends(pieces, "base", {"a:1": "base/a"})[0].count(" to ") == 2
    assert other_backends({"frozen": pieces["scale"]}, "base", {"b:1": "base/b"}) == []


def test_a_field_outside_the_experts_is_a_step_of_its_own_and_named_where_layers_are_equal():
    strict, changed = named_spec("strict"), named_spec("strict", {"model.rotary": "bf16"})
    assert [[one.field for one in step.fields] for step in path(strict, changed)] == [["model.rotary"]]
    equal = LayerResult(0, 4, strict.name, changed.name, (), None, diff=spec_diff(strict, changed))
    assert summary_of([equal]).endswith("model.rotary: fp32 against bf16.")
    assert "model" not in summary_of([replace(equal, diff=())])


@pytest.mark.parametrize("name", ["minite", "te_per_tensor", "bf16", "mxfp4"])
def test_alternatives_differ_in_one_field_that_can_change_a_value(name: str):
    spec = named_spec(name)
    seen = set()
    for field, value, other in alternatives(spec):
        [difference] = spec_diff(spec, other)
        assert (difference.field, difference.right) == (field, value)
        assert changes_values(field)
        seen.add(field)
    assert {"fc1_output", "combine", "router_position"} <= seen
    if name == "minite":
        assert {"activation.zero_block", "weight.block_scale_max", "activation.outer_domain"} <= seen


@pytest.mark.parametrize(
    "layers, count, expected",
    [(30, 11, [0, 3, 6, 9, 12, 14, 17, 20, 23, 26, 29]), (4, 11, [0, 1, 2, 3]), (30, 1, [0]), (2, 2, [0, 1])],
)
def test_depths_are_spread_over_the_layers(layers: int, count: int, expected: list[int]):
    assert depths(layers, count) == expected


def test_tokens_of_a_corpus_stand_with_their_prompt_and_place():
    assert CORPUS.tokens == 8
    assert CORPUS.response_tokens().tolist() == [7, 8, 11, 12, 13, 14, 6, 9]
    assert CORPUS.clusters().tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert CORPUS.positions().tolist() == [2, 3, 2, 3, 4, 5, 1, 2]
    assert [own.tolist() for own in CORPUS.choose(2)] == [[1, 2], [1, 4], [0, 1]]
    assert [own.tolist() for own in CORPUS.choose(99)] == [[1, 2], [1, 2, 3, 4], [0, 1]]
    assert CORPUS.first(1).sequences == CORPUS.sequences[:2]


def test_a_corpus_comes_back_from_its_file_and_a_broken_one_is_refused(tmp_path: Path):
    file = tmp_path / "sequences.json"
    file.write_text(CORPUS.to_json())
    assert Corpus.read(file) == CORPUS
    for text in ("[]", "{", '[{"prompt": 0}]', '[{"prompt": 3, "prompt_length": 1, "tokens": [1, 2]}]'):
        file.write_text(text)
        with pytest.raises(DataError, match="sequences"):
            Corpus.read(file)
    with pytest.raises(DataError, match="needs a prompt and a response"):
        Corpus(((1, 2),), (2,), (0,))


def test_a_piece_is_made_once_whole_or_not_at_all(tmp_path: Path):
    store = Store(tmp_path / "pieces")
    table = {"x": np.arange(3.0), "n": np.array([1, 2, 3])}
    result, found = store.piece("frozen.a/b", {"key": 1}, lambda: ({"a": 1}, table))
    assert result == {"a": 1} and found["x"].tolist() == [0.0, 1.0, 2.0] and found["n"].dtype.kind == "i"
    again, _ = store.piece("frozen.a/b", {"key": 1}, lambda: pytest.fail("made twice"))
    assert again == {"a": 1}
    assert store.piece("frozen.a/b", {"key": 2}, lambda: ({"a": 2}, {}))[0] == {"a": 2}

    def killed() -> tuple[dict, dict]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.piece("frozen.c", {}, killed)
    with pytest.raises(TypeError):
        store.piece("frozen.c", {}, lambda: ({"not JSON": object()}, table))
    assert len(list((tmp_path / "pieces").iterdir())) == 2  # nothing half-made is left


@pytest.mark.parametrize("name", ["bf16", "minite", "te_per_tensor"])
def test_imposed_experts_are_computed_as_in_a_batch_that_was_sent_there(name: str, place: Path):
    """Against the reference layer on the engine's own inputs with the given experts, whole batches at a time; a route
    that names no expert is counted, and leaves its token with its own.
    """
    precision_map = PrecisionMap.resolve(2, named_spec(name))
    engine = HfEngine(place / "model", precision_map, "float32")
    corpus = Corpus.read(place / "sequences.json")
    logp, own, free = engine.imposed(corpus, 1.0, [0, 1], None, corpus.choose(5))
    given = {layer: table.copy() for layer, table in own.items()}
    for sequence, tokens in enumerate(corpus.sequences):
        there = np.arange(sequence % 2, len(tokens), 3)
        given[1][sequence, there] = (given[1][sequence, there] + 1) % engine.experts
    given[1][0, corpus.choose(5)[0][0]] = engine.experts
    again, _, found = engine.imposed(corpus, 1.0, [0, 1], given, corpus.choose(5))
    assert all(
        np.array_equal(a, b) for a, b in zip(logp, again, strict=True)
    )  # the pass goes on with its own
    assert torch.equal(found[0].fc1, free[0].fc1) and torch.equal(found[0].fc2, free[0].fc2)
    assert (found[0].invalid, found[1].invalid, free[1].invalid) == (0, 1, 0)

    spec, masters = precision_map.spec_for(1), engine.blocks[1].experts.masters
    prepared = prepare(ExpertWeights.quantize(*masters, spec), spec)
    expected: dict[str, list[torch.Tensor]] = {"fc1": [], "fc2": []}
    for call, positions in zip(engine.inputs(corpus, 1.0, [1])[1][1], corpus.choose(5), strict=True):
        routes = torch.from_numpy(given[1][call.sequences, call.positions].astype(np.int64))
        ids = torch.where((routes == engine.experts).any(1, keepdim=True), call.ids, routes)
        routing = Routing.group(ids, engine.experts)
        rows = expert_rows(call.x.to(TORCH_TYPE[spec.operand]), routing, prepared, call.coefficients)
        for part, own_rows in expected.items():
            slots = routing.by_token(getattr(rows, part)).take_along_dim(ids.argsort(1)[:, :, None], 1)
            own_rows.append(slots[positions])
    # Under te_per_tensor FC2's input holds the coefficients, which other experts change.
    for part in ("fc1",) if name == "te_per_tensor" else ("fc1", "fc2"):
        assert torch.equal(getattr(found[1], part), torch.cat(expected[part]))
        assert not torch.equal(getattr(found[1], part), getattr(free[1], part))


@pytest.mark.parametrize("name", ["bf16", "minite", "te_per_tensor", "fp8_per_token"])
def test_weights_of_the_same_bytes_need_no_decoding(name: str, monkeypatch: pytest.MonkeyPatch):
    """What is said of them is what decoding them says; one byte that is other is found."""
    data, spec = synthetic_layer(LayerShape(5, 32, 16, 2, 1), "gaussian", 0), named_spec(name)
    rows = np.arange(5)
    given = Given(data.x.float(), data.topk_ids, data.topk_weights, rows, rows)
    left, right = (reference_trace(spec, (data.w13, data.w2), given) for _ in range(2))
    quickly = compare(left, right)
    with monkeypatch.context() as patch:
        patch.setattr("rl.diagnosis.compare._same_bytes", lambda *_: False)
        assert compare(left, right) == quickly
    stored = next(tensor for part, tensor in right.weights.items() if part.startswith("w2."))
    stored.view(torch.uint8)[1, 3, 2] ^= 1
    assert [d.part for d in compare(left, right) if d.differs] == ["w2"]


WRONG = {
    "nothing to run": ([], "+recipe=NAME"),
    "unknown key": (["+recipe=tiny", "studdy=[frozen]"], "studdy"),
    "unknown study": (["+recipe=tiny", "study=[frosen]"], "study"),
    "no study": (["+recipe=tiny", "study=[]"], "study=[]"),
    "unknown engine": (["+recipe=tiny", "engines=[megatron,sglang]"], "engines"),
    "unknown condition": (["+recipe=tiny", "conditions=[fp3]"], "conditions='fp3'"),
    "half a condition": (["+recipe=tiny", "conditions=[minite/]"], "conditions='minite/'"),
    "a condition twice": (["+recipe=tiny", "conditions=[bf16,bf16]"], "each once"),
    "unknown spec": (["+recipe=tiny", "sampled_under=fp3"], "sampled_under='fp3'"),
    "scale": (["+recipe=tiny", "study=[scale]", "scale.changes=[activation.outer:token]"], "scale.changes"),
    "nothing to attribute": (["+recipe=tiny", "study=[attribution]"], "attribution.learner"),
    "a gate without its study": (["+recipe=tiny", "study=[boundaries]", "gate.p99=1"], "gate"),
    "a gate on layers without them": (
        ["+recipe=tiny", "study=[frozen]", "gate.same_layers=true"],
        "boundaries",
    ),
    "a negative bound": (["+recipe=tiny", "gate.k3=-1"], "gate.k3=-1.0"),
    "a learner of two processes": (["+recipe=tiny", "learner.data_parallel=2"], "learner: 2 processes"),
    "a stock engine": (["+recipe=tiny", "sampler.stock=true"], "sampler.stock"),
    "a sampler of two processes": (
        ["+recipe=tiny", "sampler.tensor_parallel=2"],
        "sampler.tensor_parallel=2",
    ),
    "a strict spec beside others": (["+recipe=tiny", "conditions=[strict]"], "sampled_under=bf16 is not"),
    "a strict spec in transformers": (
        ["+recipe=tiny", "conditions=[strict]", "sampled_under=strict", "engines=[hf,vllm]"],
        "hf does not compute under a strict spec",
    ),
    "no sequences": (["+recipe=tiny", "sequences=/nowhere"], "sequences='/nowhere'"),
    "no checkpoint": (["+recipe=tiny", "checkpoint=/nowhere"], "checkpoint='/nowhere'"),
    "an unknown dense model": (["+recipe=tiny", "model=folder", "model.path={unknown}"], "gpt2"),
    "a dense model in Megatron": (["+recipe=tiny", "model=folder", "model.path={dense}"], "engines"),
    "no study of a dense model": (
        ["+recipe=tiny", "model=folder", "model.path={dense}", "engines=[hf,vllm]", "study=[routing]"],
        "study=['routing']",
    ),
}


def make_dense(folder: Path) -> None:
    """A tiny random Llama."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("diagnosis")
    make_model(place / "model")
    (place / "unknown").mkdir()
    (place / "unknown" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    make_dense(place / "dense")
    generator = np.random.default_rng(0)
    sequences = [tuple(generator.integers(2, 258, size).tolist()) for size in (20, 26, 17, 30)]
    corpus = Corpus(tuple(sequences), (6, 8, 5, 10), (0, 1, 2, 2))
    (place / "sequences.json").write_text(corpus.to_json())
    rows = [{"id": str(n), "problem": f"{n}+{n}?", "answer": str(2 * n)} for n in range(6)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.mark.parametrize("overrides, named", WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_refused_before_anything_starts(
    overrides: list[str], named: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import ray

    filled = [item.format(dense=place / "dense", unknown=place / "unknown") for item in overrides]
    places = [f"run.output_dir={tmp_path / 'outputs'}", f"run.cache_dir={place / 'cache'}"]
    assert main([*filled, *(places if filled else [])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and named in error and error.count("\n") == 1
    assert not (tmp_path / "outputs").exists()
    assert not ray.is_initialized()


def test_no_study_no_figure(tmp_path: Path):
    assert draw_all(Summary("x", ("hf", "hf"), Bounds(), Bootstrap()), tmp_path / "figures") == []


class Images(HTMLParser):
    """What a page loads, and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.sources: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [str(value) for key, value in attrs if key in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def keys(place: Path, *more: str) -> list[str]:
    values = {
        "model.path": place / "model",
        "data.path": place / "rows.jsonl",
        "data.held_out": 1,
        "sequences": place / "sequences.json",
        "engines": "[megatron,hf]",
        "conditions": "[bf16,minite,minite/te_exact]",
        "prompts": 3,
        "resamples": 50,
        "routing.tokens": 6,
        "attribution.learner": "minite",
        "attribution.sampler": "minite_expert",
        "run.output_dir": place / "outputs",
        "run.cache_dir": place / "cache",
        "run.object_store_mib": 80,
        "learner.threads": 1,
        "sampler.max_model_len": 64,
        "sampler.kv_cache_gib": 0.1,
        "algorithm.sampling.max_tokens": 8,
    }
    return ["model=folder", "data=file", *(f"{key}={value}" for key, value in values.items()), *more]


def test_other_code_or_settings_of_an_engine_begin_anew(place: Path, monkeypatch: pytest.MonkeyPatch):
    """A gate must not pass on what they gave before."""

    def folder(*more: str) -> Path:
        return make_plan(load_extended("diagnose", DiagnoseConfig, keys(place, *more))).folder

    first = folder()
    assert folder("study=[frozen,routing]", "gate.p99=1") == first
    assert folder("sampler.prefix_caching=false") != first != folder("learner.micro_batch_tokens=100")
    monkeypatch.setattr("rl.diagnosis.plan.source_digest", lambda: "of other modules")
    assert folder() != first


@pytest.mark.slow
def test_a_diagnosis_from_the_command_line_grows_by_studies_and_ends_as_its_gate_says(
    place: Path, capsys: pytest.CaptureFixture[str]
):
    """Megatron against transformers. The first launch, with processes of their own, makes part of it, the second, with
    engines in this one, the rest, the third nothing.
    """
    command = [
        sys.executable,
        "-m",
        "rl.diagnose",
        *keys(place, "study=[frozen]", "conditions=[bf16,minite]"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = (place / "outputs" / "diagnose").iterdir()
    made = {piece.name: os.stat(piece).st_mtime_ns for piece in (folder / "pieces").iterdir()}
    assert sorted(name.rpartition("-")[0] for name in made) == ["frozen.bf16", "frozen.minite"]

    everything = "study=[frozen,routing,scale,boundaries,attribution]"
    with engines_in_process():
        assert main(keys(place, everything, "gate.p99=1e-4", "gate.same_layers=true")) == 1
    out, err = capsys.readouterr()
    assert err.count("gate: ") == 2  # minite/te_exact exceeds both
    assert (
        "p99 under minite/te_exact is" in err and "Layer 0: the engines part at the quantised operands" in err
    )
    assert f"report: {folder}/report.html" in out
    assert made.items() <= {p.name: os.stat(p).st_mtime_ns for p in (folder / "pieces").iterdir()}.items()
    _check_results(folder)
    _check_page(folder)

    assert main(keys(place, everything, "gate.p99=1", "gate.conditions=[bf16]")) == 0
    assert "starting" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_dense_model_by_its_log_probabilities_alone(place: Path, capsys: pytest.CaptureFixture[str]):
    """transformers against vLLM, which writes the responses; the studies of experts are left out with a note."""
    places = [f"model.path={place / 'dense'}", "engines=[hf,vllm]", "sequences=null", "conditions=[bf16]"]
    sizes = ["sampler.max_num_seqs=8", "sampler.max_num_batched_tokens=256", "sampler.threads=1", "prompts=2"]
    studies = ["study=[frozen,boundaries]", "run.name=dense", "gate.max=1e-4"]
    with engines_in_process():
        assert main(keys(place, *places, *sizes, *studies)) == 0
    assert "Left out, as they are about experts: boundaries" in capsys.readouterr().out
    [folder] = (place / "outputs" / "diagnose").glob("dense-*")
    results = json.loads((folder / "results.json").read_text())
    [gap] = results["gaps"]
    assert (gap["label"], gap["tokens"]) == ("dense", results["sequences"]["tokens"])
    assert 0 < gap["statistics"]["max"]["value"] < 1e-4
    assert "dense model" in Images((folder / "report.html").read_text()).text


def _check_results(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())
    gaps = {gap["label"]: gap for gap in results["gaps"]}
    assert list(gaps) == ["bf16", "minite", "minite/te_exact"]
    # Two implementations of one model in FP32, the same expert layers: next to nothing is left.
    assert gaps["minite"]["statistics"]["p99"]["value"] < 1e-5
    found = gaps["minite/te_exact"]
    assert found["statistics"]["p99"]["value"] > 1e-3
    assert found["increase"]["p99"]["low"] > 0
    table = parquet.read_table(next((folder / "pieces").glob("frozen.minite+te_exact-*")) / "table.parquet")
    corpus = Corpus.read(folder / "sequences.json")
    assert table["token"].to_pylist() == corpus.response_tokens().tolist()
    distance = np.abs(table["left_logp"].to_numpy() - table["right_logp"].to_numpy())
    assert np.quantile(distance, 0.99) == pytest.approx(found["statistics"]["p99"]["value"])

    same, other = results["routing"][1], results["routing"][2]
    assert same["invalid_experts"] == other["invalid_experts"] == 0
    assert [one["layer"] for one in same["depths"]] == [0, 1]
    assert all(one["fc1"]["value"] < 1e-3 for one in same["depths"])
    assert all(one["fc1"]["value"] > 1e-2 for one in other["depths"])
    [scale] = results["scale"]
    assert scale["change"] == "activation.outer_domain:token"
    assert scale["changed"]["increase"]["abs_mean"]["value"] != 0

    assert not any("back end" in note for note in results["notes"])
    used = {
        "frozen.minite": ["reference", "reference"],
        "attribution": {"right_0": "reference", "right_1": "reference"},
    }
    for name, backends in used.items():
        piece = next((folder / "pieces").glob(f"{name}-*")) / "result.json"
        assert json.loads(piece.read_text())["backends"] == backends

    steps = results["attribution"]["forwards"]
    assert [step["fields"] for step in steps] == [["weight.outer_domain: row -> expert"]]
    assert results["attribution"]["start_p99"] < 1e-5 < steps[0]["p99"]


def _check_page(folder: Path) -> None:
    page = Images((folder / "report.html").read_text())
    assert len(page.sources) == 5
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    for text in ("Frozen policy", "Routing control", "Scale control", "Three boundaries", "Attribution"):
        assert text in page.text
    for name in ("tail", "depth", "scale", "boundaries", "attribution"):
        assert (folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_the_catalogue_is_what_conditions_take():
    from rl.diagnosis.config import ScaleStudy

    assert all(replace(ScaleStudy(), spec=name).spec == name for name in CATALOGUE)

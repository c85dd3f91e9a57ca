"""The arithmetic of memory against what the engines' own code allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights, StoredLayout
from kernels.precision_map import PrecisionMap
from kernels.triton import per_tensor_layer
from kernels.triton.layer import prepare
from learner.config import LearnerConfig, ObjectiveConfig
from learner.families.architecture import Architecture
from learner.initialize import initialize
from learner.layout import Layout
from learner.packing import Packing
from learner.policy import Policy
from rl.preflight.activations import _SIZE, _norm, layer_bytes_per_token
from rl.preflight.memory import expert_bytes, learner_memory, sampler_memory
from rl.preflight.traffic import sync_bytes
from sampler.config import SamplerConfig
from tests.learner.batches import make_batch

LAYERS = 3
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "vocab_size": 96,
}
LENGTHS = torch.tensor([60, 40, 30])
CASES = [("float32", "minite"), ("bfloat16", "minite"), ("bfloat16", "bf16"), ("float32", "te_per_tensor")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preflight") / "model"
    initialize(path, MODEL, seed=0)
    return path


def policy(folder: Path, dtype: str, spec: str, **changes: Any) -> Policy:
    config = LearnerConfig(dtype=dtype, threads=1, micro_batch_tokens=60, **changes)
    return Policy(folder, PrecisionMap.resolve(LAYERS, named_spec(spec)), config, seed=0)


def storages(tensors: Any) -> dict[int, int]:
    """Address -> bytes of the memory behind tensors."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def batch() -> Any:
    """Three sequences of 60 tokens."""
    mask = torch.ones(3, 59, dtype=torch.bool)
    logp = torch.full(mask.shape, -4.0)
    return make_batch(mask, logp, logp, torch.ones(3))


def test_what_a_strict_engine_multiplies_is_held_in_fixed_point(folder: Path):
    own = policy(folder, "bfloat16", "strict")
    own.score(*(getattr(batch(), name) for name in ("tokens", "lengths", "loss_mask")), temperature=1.0)
    weights = [part.form for part in own.model.modules() if hasattr(part, "form")]
    forms = storages(part._made[1].integers for part in (*weights, own.model.strict_output.weight))
    planned = learner_memory(own.architecture, own.precision_map, own.config, Layout(), backend="reference")
    assert planned.standing["weights in fixed point"] == sum(forms.values())


@pytest.mark.parametrize("dtype, spec", CASES)
def test_what_a_learner_holds(folder: Path, dtype: str, spec: str):
    own = policy(folder, dtype, spec)
    own.update(batch(), ObjectiveConfig(), temperature=1.0)
    own.score(*(getattr(batch(), name) for name in ("tokens", "lengths", "loss_mask")), temperature=1.0)
    memory = learner_memory(own.architecture, own.precision_map, own.config, Layout(), backend="reference")
    parameters = storages(own.model.parameters())
    assert memory.standing["weights"] == sum(parameters.values())
    masters = storages(own.optimizer.masters.values())
    assert memory.standing["FP32 masters"] == sum(masters[key] for key in masters.keys() - parameters.keys())
    moments = {
        name: t for name, t in own.optimizer.state().items() if name.endswith(("exp_avg", "exp_avg_sq"))
    }
    assert memory.standing["AdamW's moments"] == sum(storages(moments.values()).values())
    stored, derived = {}, {}
    for layer in own.model.experts():
        stored |= storages(layer.quantized(layer.execution_spec).tensors().values())
        derived |= storages(layer.derived(layer.execution_spec).values())
    stored = {key: size for key, size in stored.items() if key not in parameters}
    assert memory.standing["quantised experts"] == sum(stored.values())
    apart = {key: size for key, size in derived.items() if key not in stored}
    assert memory.standing["experts decoded or laid out"] == pytest.approx(sum(apart.values()), rel=0.02)


@pytest.mark.parametrize("dtype, spec", CASES)
def test_what_autograd_saves(folder: Path, dtype: str, spec: str):
    own = policy(folder, dtype, spec)
    experts = [layer._current() for layer in own.model.experts()]
    known = storages(own.model.parameters())
    for weights, prepared in experts:
        known |= storages(weights.tensors().values()) | storages(prepared.derived().values())
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    tokens = torch.randint(0, 96, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        own.model.hidden_states(tokens, Packing.of(LENGTHS))
    measured = sum(size for key, size in storages(saved).items() if key not in known)
    padding = len(LENGTHS) * int(LENGTHS.max()) / len(tokens)
    layer = layer_bytes_per_token(own.architecture, named_spec(spec), dtype, gpu=False, padding=padding)
    predicted = len(tokens) * (LAYERS * layer + _norm(128, 1, _SIZE[dtype], gpu=False))
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("dtype, spec", [("float32", "minite"), ("bfloat16", "minite")])
def test_the_peak_of_an_update(folder: Path, dtype: str, spec: str):
    """Of what torch's allocator gives out during an update, above what stands."""
    own = policy(folder, dtype, spec, logits_bytes=2**20)
    own.update(batch(), ObjectiveConfig(), temperature=1.0)
    own.score(*(getattr(batch(), name) for name in ("tokens", "lengths", "loss_mask")), temperature=1.0)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        own.update(batch(), ObjectiveConfig(), temperature=1.0)
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    memory = learner_memory(own.architecture, own.precision_map, own.config, Layout(), backend="reference")
    assert sum(memory.working.values()) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("spec", ["minite", "minite_expert", "te_per_tensor", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_sync_are_those_of_the_export(folder: Path, dtype: str, spec: str):
    own = policy(folder, dtype, spec)
    exported = sum(tensor.numel() * tensor.element_size() for _, tensor in own.export())
    assert sync_bytes(own.architecture, own.precision_map, dtype, "packed").total == exported
    operands = sum(tensor.numel() * tensor.element_size() for _, tensor in own.export_operands())
    assert sync_bytes(own.architecture, own.precision_map, dtype, "bf16").total == operands


@pytest.mark.parametrize("name", ["minite", "minite_expert"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("ffn", "layout"), [(128, "auto"), (128, "rows"), (64, "auto")])
def test_what_the_emulated_kernels_lay_out(ffn: int, layout: str, compact: bool, name: str):
    """Triton's interpreter runs here. A width of 64 makes no tiles."""
    spec, generator = named_spec(name), torch.Generator().manual_seed(0)
    shapes = ((1, 2 * ffn, 128), (1, 128, ffn))
    w13, w2 = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    asked = StoredLayout.ROWS if layout == "rows" else StoredLayout.TILES
    weights = ExpertWeights.quantize(w13, w2, spec).in_layout(asked)
    predicted = expert_bytes(
        _one_expert(ffn), PrecisionMap((spec,)), "triton_emulated", 1, compact=compact, layout=layout
    )
    prepared = prepare(weights, spec, compact=compact)
    stored = {t.data_ptr(): t for t in weights.tensors().values()}
    tensors = [tensor for matrix in (prepared.w13, prepared.w2) for tensor in matrix.tensors()]
    derived = [tensor for tensor in tensors if tensor.data_ptr() not in stored]
    assert predicted.derived == sum(t.numel() * t.element_size() for t in derived)
    assert predicted.stored == sum(t.numel() * t.element_size() for t in stored.values())


@pytest.mark.parametrize("compact", [False, True], ids=["learner", "sampler"])
def test_what_the_per_tensor_kernels_lay_out(compact: bool):
    """In Triton's interpreter. A learner has the weights a second time, as the gradient's products take them."""
    spec, generator = named_spec("te_per_tensor"), torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(shape, generator=generator).bfloat16() for shape in ((1, 256, 128), (1, 128, 128)))
    prepared = per_tensor_layer.prepare(ExpertWeights.quantize(w13, w2, spec), spec, compact=compact)
    matrices = [prepared.w13.product, prepared.w2.product]
    if not compact:
        matrices += [prepared.products.transposed(w, name) for w, name in ((w13, "FC1"), (w2, "FC2"))]
    tensors = [tensor for matrix in matrices for tensor in matrix.tensors()]
    predicted = expert_bytes(_one_expert(128), PrecisionMap((spec,)), "triton_emulated", 1, compact=compact)
    assert predicted.derived == sum(t.numel() * t.element_size() for t in tensors)


def _one_expert(ffn: int) -> Architecture:
    return Architecture(
        layers=1, hidden=128, heads=1, kv_heads=1, head_dim=128, experts=1, experts_per_token=1, expert_ffn=ffn,
        vocab=16, max_positions=16, rope_theta=1.0, norm_eps=1e-6, tied_embeddings=False, qk_norm=False,
        renormalize_router=False,
    )  # fmt: skip


def test_a_sampler_of_two_ranks_holds_half_of_what_is_split(folder: Path):
    own = policy(folder, "bfloat16", "minite")
    one, two = (
        sampler_memory(
            own.architecture,
            own.precision_map,
            SamplerConfig(dtype="bfloat16", tensor_parallel=n),
            backend="reference",
            gpu=False,
        )
        for n in (1, 2)
    )
    assert two.standing["quantised experts"] * 2 == one.standing["quantised experts"]
    whole = sum(t.numel() * t.element_size() for name, t in own.export() if ".experts." not in name)
    assert one.standing["weights outside the experts"] == whole
    assert one.standing["keys and values"] == two.standing["keys and values"] == 2**30

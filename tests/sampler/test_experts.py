"""The expert layers inside the engine."""

from __future__ import annotations

import shutil
from itertools import permutations
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from kernels import reference
from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights
from kernels.precision_map import PrecisionMap
from sampler.config import SamplingConfig
from sampler.engine import Sampler
from sampler.quantization import MiniteConfig, quantization_config
from tests.sampler.conftest import (
    FAMILIES,
    LAYERS,
    MakeModel,
    MakeSampler,
    StartSampler,
    prompts,
    tiny_config,
)
from tests.sampler.wire import expert_masters


@pytest.mark.parametrize("spec_name", ["minite", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_the_reference(
    family: str, spec_name: str, sampler_for: MakeSampler, model_folder: MakeModel
) -> None:
    """Bitwise, recomputed from the checkpoint and the layer's input."""
    sampler, spec = sampler_for(family, spec_name), named_spec(spec_name)
    layer = sampler._model.model.layers[1]
    block = layer.mlp if family == "qwen3_moe" else layer.block_sparse_moe
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = block.register_forward_hook(lambda _, args, output: seen.append((args[0].clone(), output)))
    before = sampler.report().expert_calls
    sampler.generate(prompts(), [[0]] * 6, SamplingConfig(max_tokens=3))
    hook.remove()
    assert sampler.report().expert_calls - before == LAYERS * len(seen)
    assert len(seen) == 3

    state = load_file(model_folder(family) / "model.safetensors")
    prepared = reference.prepare(ExpertWeights.quantize(*expert_masters(state, 1), spec), spec)
    gate = next(state[name] for name in state if "layers.1." in name and name.endswith(".gate.weight"))
    for x, output in seen:
        values, ids = F.linear(x, gate).topk(sampler._experts[1].moe.experts_per_token, sorted=False)
        coefficients, order = values.softmax(-1).sort(descending=True)
        expected = reference.forward(x, ids.gather(1, order), coefficients, prepared, spec)
        assert torch.equal(output, expected.float())


@pytest.mark.parametrize("spec", ["minite", "minite_expert", "bf16", "fp32"])
def test_spec_travels_in_the_model_configuration(spec: str) -> None:
    precision_map = PrecisionMap.resolve(3, named_spec(spec), first_layers_bf16=1)
    config = quantization_config(precision_map)
    assert config["quant_method"] == "minite"
    assert MiniteConfig.from_config(config).precision_map == precision_map
    with pytest.raises(ValueError, match="layers"):
        MiniteConfig.from_config({**config, "group_size": 16})


def test_layers_follow_the_precision_map(start_sampler: StartSampler, model_folder: MakeModel) -> None:
    """BF16 in the first layer, packed codes alone in the second, and the report says so."""
    precision_map = PrecisionMap.resolve(LAYERS, named_spec("minite_expert"), first_layers_bf16=1)
    sampler = start_sampler(model_folder("mixtral"), precision_map)
    report = sampler.report()
    assert report.precision_map == precision_map
    assert (report.engine, report.backend, report.expert_layers) == ("vllm", "reference", LAYERS)
    first, second = (
        dict(layer.block_sparse_moe.experts.named_parameters()) for layer in sampler._model.model.layers
    )
    assert {n.rpartition(".")[2]: p.dtype for n, p in first.items()} == {
        "w13_weight": torch.bfloat16,
        "w2_weight": torch.bfloat16,
    }
    expected = ExpertWeights.empty(4, 64, 48, named_spec("minite_expert")).tensors()
    assert {n.rpartition(".")[2]: (p.dtype, p.shape) for n, p in second.items()} == {
        part.replace(".", "_"): (t.dtype, t.shape) for part, t in expected.items()
    }


def test_a_layer_does_not_depend_on_the_order_of_slots(sampler_for: MakeSampler) -> None:
    sampler = sampler_for("qwen3_moe", "fp32")  # whose sums are not hidden by a cast
    layer = sampler._model.model.layers[0].mlp.experts.routed_experts
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator)
    weights = torch.rand(50, 3, generator=generator)
    ids = torch.rand(50, 8, generator=generator).argsort(-1)[:, :3]
    outputs = {
        order: layer.forward_modular(x=x, topk_weights=weights[:, order], topk_ids=ids[:, order])
        for order in permutations(range(3))
    }
    assert all(torch.equal(output, outputs[0, 1, 2]) for output in outputs.values())


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("model.layers.1.mlp.experts.3.up_proj.weight", "layers.1.*lacks experts"),
        ("model.layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight"),
    ],
)
def test_incomplete_checkpoints_are_refused(
    lost: str, message: str, model_folder: MakeModel, tmp_path: Path
) -> None:
    shutil.copytree(model_folder("qwen3_moe"), tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    del state[lost]
    save_file(state, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    precision_map = PrecisionMap.resolve(LAYERS, named_spec("bf16"))
    with pytest.raises(ValueError, match=message):
        Sampler(tmp_path / "model", precision_map, tiny_config())

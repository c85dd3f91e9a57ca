from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from sampler.config import SamplerConfig
from sampler.engine import Sampler
from sampler.model_check import HEAD_DIMS, check_model
from tests.sampler.conftest import LAYERS, MakeModel, StartSampler, tiny_config

MAP = PrecisionMap.resolve(LAYERS, named_spec("minite"))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config.json"):
        Sampler(tmp_path, MAP, tiny_config())


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, r"\['LlamaForCausalLM'\], the sampler runs Qwen3Moe"),
        ({"mlp_only_layers": [1]}, {}, r"has layers without experts"),
        ({"decoder_sparse_step": 2}, {}, r"has layers without experts"),
        ({"num_hidden_layers": 3}, {}, r"precision map has 2 layers, .* has 3"),
        ({}, {"max_model_len": 200}, r"max_model_len=200 is more than max_position_embeddings=128"),
        ({"head_dim": 16}, {}, r"attention heads of 16 elements, .* takes 32, 64"),
        (
            {},
            {"expert_layout": "tiles"},
            r"expert_layout=tiles: no layer .* multiples of 128, got hidden_size=64 and experts of 48",
        ),
        ({}, {"tensor_parallel": 3}, r"tensor_parallel=3 does not divide the model's 4 attention heads"),
        ({}, {"tensor_parallel": 4}, r"tensor_parallel=4 does not divide the model's 2 key-value heads"),
        ({"vocab_size": 71}, {"tensor_parallel": 2}, r"=2 does not divide the model's 71 entries of the voc"),
        ({"num_local_experts": 5}, {"tensor_parallel": 2}, r"=2 does not divide the model's 5 experts"),
        (
            {},
            {"tensor_parallel": 2, "device": "cuda", "cuda_graph_sizes": (1,)},
            r"=2: cuda_graph_sizes=\(1,\)",
        ),
        ({}, {"kv_cache_gib": 1e-4}, r"kv_cache_gib=0.0001 must be at least 0.000122: .*max_model_len=96"),
    ],
)
def test_refused(
    model: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    model_folder: MakeModel,
    tmp_path: Path,
) -> None:
    sound = json.loads((model_folder("mixtral") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(sound | model))
    with pytest.raises(ValueError, match=message):
        check_model(tmp_path, MAP, tiny_config(**settings))


def test_a_spec_that_several_processes_do_not_compute(model_folder: MakeModel) -> None:
    strict = PrecisionMap.resolve(LAYERS, named_spec("strict"))
    with pytest.raises(ValueError, match="a strict spec fixes the order"):
        check_model(model_folder("mixtral"), strict, tiny_config(tensor_parallel=2))
    for name in ("minite", "te_per_tensor"):
        other = PrecisionMap.resolve(LAYERS, named_spec(name))
        check_model(model_folder("mixtral"), other, tiny_config(tensor_parallel=2))


def test_a_dense_or_stock_engine_has_one_process(model_folder: MakeModel, tmp_path: Path) -> None:
    dense = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    with pytest.raises(ValueError, match=r"tensor_parallel=2 must be 1 for a dense model"):
        check_model(tmp_path, None, tiny_config(tensor_parallel=2))
    with pytest.raises(ValueError, match=r"tensor_parallel=2: a stock engine has one process"):
        check_model(model_folder("qwen3_moe"), MAP, tiny_config(tensor_parallel=2, stock=True))


def test_processes_that_cannot_meet_are_refused(
    model_folder: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 3, not set are RANK, LOCAL_RANK, MASTER_ADDR"):
        Sampler(model_folder("qwen3_moe"), MAP, tiny_config(tensor_parallel=2))


def test_the_smallest_cache_is_enough(start_sampler: StartSampler, model_folder: MakeModel) -> None:
    folder = model_folder("mixtral")
    config: SamplerConfig = tiny_config(kv_cache_gib=4 * 32 * 2 * LAYERS * 2 * 32 * 4 / 2**30)
    check_model(folder, MAP, config)
    assert start_sampler(folder, MAP, kv_cache_gib=config.kv_cache_gib).score([[1] * 96], [95])


def test_on_a_gpu_heads_of_other_sizes_are_not_refused(model_folder: MakeModel, tmp_path: Path) -> None:
    sound = json.loads((model_folder("mixtral") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(sound | {"head_dim": 16}))
    check_model(tmp_path, MAP, tiny_config(device="cuda"))


def test_steps_of_a_strict_engine_are_not_captured(model_folder: MakeModel) -> None:
    strict = PrecisionMap.resolve(LAYERS, named_spec("strict"))
    config = tiny_config(device="cuda", cuda_graph_sizes=(1, 2))
    check_model(model_folder("mixtral"), MAP, config)
    with pytest.raises(ValueError, match=r"cuda_graph_sizes=\(1, 2\) must be empty under a strict spec"):
        check_model(model_folder("mixtral"), strict, config)


def test_an_engine_for_another_device_than_the_installed_is_refused(model_folder: MakeModel) -> None:
    with pytest.raises(
        ValueError, match=r"SamplerConfig.device=cuda, the vLLM that is installed runs on cpu"
    ):
        Sampler(model_folder("mixtral"), MAP, tiny_config(device="cuda"))


def test_head_sizes_are_those_of_the_attention() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(HEAD_DIMS) == CPUAttentionBackend.get_supported_head_sizes()

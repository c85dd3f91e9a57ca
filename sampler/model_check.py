"""Whether a model folder, a precision map and the settings fit each other, from `config.json` alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sampler.config import SamplerConfig

if TYPE_CHECKING:
    from kernels.precision_map import PrecisionMap
    from kernels.spec import ExecutionSpec

ARCHITECTURES = ("Qwen3MoeForCausalLM", "MixtralForCausalLM")
STOCK = "Qwen3MoeForCausalLM"  # what a stock engine was seen to reload rightly
DENSE = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)  # without a precision map, for a diagnosis
# Of vLLM's CPU attention. It takes other heads, and fails in the first forward pass.
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
BLOCK_SIZE = 32  # tokens in a block of the cache: the smallest it takes, as prompts share whole blocks


def check_model(model_dir: Path, precision_map: PrecisionMap | None, config: SamplerConfig) -> None:
    """Raises ValueError, naming value and rule, when the engine could not run this. precision_map: None for a dense
    model.
    """
    if not (model_dir / "config.json").is_file():
        raise ValueError(f"{model_dir} is not a model folder: it holds no config.json")
    model = json.loads((model_dir / "config.json").read_text())
    architectures = model.get("architectures") or []
    known = DENSE if precision_map is None else ARCHITECTURES
    if not set(architectures) & set(known):
        raise ValueError(f"{model_dir} holds {architectures}, the sampler runs {', '.join(known)}")
    if config.stock and (model.get("tie_word_embeddings") or STOCK not in architectures):
        raise ValueError(
            f"SamplerConfig.stock: {model_dir} must be a {STOCK} with an output layer of its own; after the reload of a"
            " Mixtral with a tied one, vLLM's CPU build computes with wrong weights"
        )
    if precision_map and (layers := len(precision_map.layers)) != model["num_hidden_layers"]:
        raise ValueError(
            f"the precision map has {layers} layers, {model_dir} has {model['num_hidden_layers']}"
        )
    if model.get("mlp_only_layers") or model.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"{model_dir} has layers without experts, the sampler runs models with experts in all"
        )
    if config.tensor_parallel > 1:
        _check_ranks(model, precision_map, config)
    if config.expert_layout == "tiles":
        _check_tiles(model, model_dir, precision_map)
    if config.max_model_len > model["max_position_embeddings"]:
        raise ValueError(
            f"SamplerConfig.max_model_len={config.max_model_len} is more than max_position_embeddings="
            f"{model['max_position_embeddings']} of {model_dir}"
        )
    strict = precision_map is not None and precision_map.model is not None
    for problem in spec_problems(strict, config):
        raise ValueError(f"SamplerConfig.{problem}")
    if config.device == "cpu" and _head_dim(model) not in HEAD_DIMS:
        raise ValueError(
            f"{model_dir} has attention heads of {_head_dim(model)} elements, vLLM's CPU attention takes"
            f" {', '.join(map(str, HEAD_DIMS))}"
        )
    needed = _cache_bytes(model, config) / 2**30
    if needed > config.kv_cache_gib:
        raise ValueError(
            f"SamplerConfig.kv_cache_gib={config.kv_cache_gib:.3g} must be at least {needed:.3g}: keys and"
            f" values of one sequence of max_model_len={config.max_model_len}"
        )


def _check_ranks(model: dict[str, Any], precision_map: PrecisionMap | None, config: SamplerConfig) -> None:
    """What an engine of several processes cannot do, or cannot share out evenly."""
    said = f"SamplerConfig.tensor_parallel={config.tensor_parallel}"
    if precision_map is None:
        raise ValueError(f"{said} must be 1 for a dense model")
    for problem in rank_problems(precision_map.layers, config):
        raise ValueError(f"{said}: {problem}")
    for what, value in (
        ("attention heads", model["num_attention_heads"]),
        ("key-value heads", model["num_key_value_heads"]),
        ("entries of the vocabulary", model["vocab_size"]),
        ("experts", model.get("num_experts") or model["num_local_experts"]),
    ):
        if value % config.tensor_parallel:
            raise ValueError(f"{said} does not divide the model's {value} {what}")


def rank_problems(specs: Iterable[ExecutionSpec], config: SamplerConfig) -> Iterator[str]:
    """What an engine of several processes cannot do, whatever the model. specs: of its layers."""
    if config.stock:
        yield "a stock engine has one process: its experts would be cut, or added up, in an order of its own"
    if config.cuda_graph_sizes:
        yield (
            f"cuda_graph_sizes={config.cuda_graph_sizes} must be empty: what the processes send each other was not"
            " captured in a graph yet"
        )
    if any(spec.strict for spec in specs):
        yield "a strict spec fixes the order of every sum, and processes that share out attention add up in another"


def spec_problems(strict: bool, config: SamplerConfig) -> Iterator[str]:
    """Settings that do not go with the spec, whatever the model. strict: whether it is a strict one."""
    if config.chunked_prefill and not strict:
        yield (
            "chunked_prefill=True needs a strict spec: on CPUs, vLLM cannot cut the prompt of a request with a seed of"
            " its own"
        )
    if config.cuda_graph_sizes and strict:
        yield (
            f"cuda_graph_sizes={config.cuda_graph_sizes} must be empty under a strict spec, whose attention asks in"
            " every step which sequences there are"
        )


def _check_tiles(model: dict[str, Any], model_dir: Path, precision_map: PrecisionMap | None) -> None:
    from kernels.experts import can_stand_in_tiles

    ffn = model.get("moe_intermediate_size") or model.get("intermediate_size")
    specs = () if precision_map is None else precision_map.layers
    if not any(can_stand_in_tiles(model["hidden_size"], ffn, spec) for spec in specs):
        raise ValueError(
            f"SamplerConfig.expert_layout=tiles: no layer of {model_dir} can stand in tiles, which need 4-bit weights"
            " in blocks of 1x16 and widths of multiples of 128, got"
            f" hidden_size={model['hidden_size']} and experts of {ffn}"
        )


def _head_dim(model: dict[str, Any]) -> int:
    return model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]


def least_cache_tokens(config: SamplerConfig) -> int:
    """One sequence of the greatest length in whole blocks, and the block that vLLM keeps for itself."""
    return (math.ceil(config.max_model_len / BLOCK_SIZE) + 1) * BLOCK_SIZE


def _cache_bytes(model: dict[str, Any], config: SamplerConfig) -> int:
    """Of the least that vLLM works with."""
    tokens = least_cache_tokens(config)
    itemsize = {"float32": 4, "bfloat16": 2}[config.dtype]
    heads = model["num_key_value_heads"] // config.tensor_parallel
    return 2 * tokens * model["num_hidden_layers"] * heads * _head_dim(model) * itemsize

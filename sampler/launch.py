"""vLLM, started as a sampler needs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.precision_map import PrecisionMap
from sampler.config import SamplerConfig
from sampler.environment import vllm_environment
from sampler.graphs import graph_settings
from sampler.model_check import BLOCK_SIZE

if TYPE_CHECKING:
    from vllm import LLM

# The size of the cache is given in bytes. This is the share of the memory that vLLM wants to find free at its start,
# where a learner may be on the same GPU.
ON_A_GPU = {
    "gpu_memory_utilization": 0.01,
    "enable_flashinfer_autotune": False,  # minutes at the start, for kernels that are not used here
}
# Whose cache and metadata `sampler.strict.attention` uses there: the one back end that takes FP32, too.
_STRICT_ON_A_GPU = {"attention_config": {"backend": "TRITON_ATTN"}}


def start_vllm(model_dir: Path, precision_map: PrecisionMap | None, config: SamplerConfig) -> LLM:
    """An engine in this process. Raises ValueError when the vLLM that is installed is for another device."""
    gpu = config.device == "cuda"
    strict = precision_map is not None and precision_map.model is not None
    with vllm_environment(config):
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.device_type != config.device:
            found = current_platform.device_type or "no device that it finds here"
            raise ValueError(
                f"SamplerConfig.device={config.device}, the vLLM that is installed runs on {found}"
            )
        return LLM(
            model=str(model_dir),
            skip_tokenizer_init=True,
            generation_config="vllm",  # the folder's own would add stop tokens of its own
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
            enable_prefix_caching=config.prefix_caching,
            block_size=BLOCK_SIZE,
            enable_chunked_prefill=config.chunked_prefill,
            enable_sleep_mode=config.sleep != "off" and gpu,  # vLLM's CPU build has no sleep
            logprobs_mode="processed_logprobs",
            seed=config.seed,
            **graph_settings(config.cuda_graph_sizes),
            **(ON_A_GPU if gpu else {}),
            **(_STRICT_ON_A_GPU if gpu and strict else {}),
            **_expert_settings(config, precision_map),
        )


def _expert_settings(config: SamplerConfig, precision_map: PrecisionMap | None) -> dict[str, Any]:
    """What makes vLLM compute experts under `precision_map` and keep its weights live; a stock engine does neither."""
    overrides: dict[str, Any] = {"head_dtype": "float32"}  # logits are never rounded to the model's type
    if config.stock:
        return {"hf_overrides": overrides}
    from sampler.loader import LOAD_FORMAT
    from sampler.plugin import register
    from sampler.quantization import METHOD, quantization_config

    register()
    if precision_map is None:
        return {"load_format": LOAD_FORMAT, "hf_overrides": overrides}
    overrides["quantization_config"] = quantization_config(precision_map, config.expert_layout)
    return {"load_format": LOAD_FORMAT, "quantization": METHOD, "hf_overrides": overrides}

"""vLLM, started as a sampler needs it."""

from __future__ import annotations

import gc
import os
import sys
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
    """An engine in this process, or this process's part of one. Raises ValueError when the vLLM that is installed is
    for another device, and without the variables by which the processes of one engine meet.
    """
    gpu = config.device == "cuda"
    strict = precision_map is not None and precision_map.model is not None
    with vllm_environment(config):
        _load()
        from vllm import LLM
        from vllm.platforms import current_platform

        if config.tensor_parallel > 1 and not gpu:
            _speak_by_sockets()

        if current_platform.device_type != config.device:
            found = current_platform.device_type or "no device that it finds here"
            raise ValueError(
                f"SamplerConfig.device={config.device}, the vLLM that is installed runs on {found}"
            )
        engine = LLM(
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
            **_rank_settings(config),
            **(ON_A_GPU if gpu else {}),
            **(_STRICT_ON_A_GPU if gpu and strict else {}),
            **_expert_settings(config, precision_map),
        )
        if config.tensor_parallel > 1:
            _close_broadcaster()
        return engine


def _load() -> None:
    """Import vLLM. It makes hundreds of thousands of objects that stay: Python's search for cyclic garbage would go
    through them again and again while it is imported, and five times more as an engine starts, as vLLM asks for that.
    """
    if "vllm" in sys.modules:
        return
    gc.disable()
    try:
        from vllm import LLM  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def _speak_by_sockets() -> None:
    """Of processes on CPUs. vLLM has them share memory that it names after the way in which they meet: with torchrun's
    variables that is the same for all engines of a machine, and for what one that was killed has left behind.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: (
        False
    )  # which has it take torch.distributed


def _close_broadcaster() -> None:
    """The queue by which one scheduler would tell the other processes what to do: here each has its own. Its shared
    memory outlives a process that is killed.
    """
    from vllm.distributed import get_tp_group

    get_tp_group().mq_broadcaster = None


def _rank_settings(config: SamplerConfig) -> dict[str, Any]:
    """Each process has a scheduler of its own, which does the same with the same requests, and runs one rank."""
    ranks = config.tensor_parallel
    if ranks == 1:
        return {}
    missing = [
        name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing or os.environ.get("WORLD_SIZE") != str(ranks):
        raise ValueError(
            f"SamplerConfig.tensor_parallel={ranks} needs as many processes, with torchrun's variables: WORLD_SIZE is"
            f" {os.environ.get('WORLD_SIZE')}, not set are {', '.join(missing) or 'none'}"
        )
    return {
        "tensor_parallel_size": ranks,
        "enable_expert_parallel": True,  # experts stay whole: an FC2 input is scaled over all of its row
        "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,  # its buffers are mapped between processes: not tried with sleep
        "async_scheduling": False,  # all schedulers see a step end before the next
    }


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

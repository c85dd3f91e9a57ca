"""Makes miniTE's quantisation method and weight loader known to vLLM (entry point `vllm.general_plugins`)."""

from __future__ import annotations

from functools import cache


@cache
def register() -> None:
    """vLLM calls it in each of its processes; the first call in a process counts."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from sampler.loader import LOAD_FORMAT, LiveWeightsLoader
    from sampler.quantization import METHOD, MiniteConfig

    register_quantization_config(METHOD)(MiniteConfig)
    register_model_loader(LOAD_FORMAT)(LiveWeightsLoader)

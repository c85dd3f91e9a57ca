"""Loads a checkpoint strictly, and keeps the weights as they were loaded.

vLLM's CPU methods repack a layer's weights for its matrix product and drop the original, out of reach of an
update in place. The methods here compute on the live weights instead.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from sampler.quantization import expert_methods
from sampler.strict.model import is_router, make_strict

LOAD_FORMAT = "minite"


class LiveWeightsLoader(DefaultModelLoader):
    """Reads safetensors; a parameter that the checkpoint lacks is an error (vLLM asks that of unquantised
    models only).
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))
        self.enable_weights_track = True

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        keep_weights_live(model)
        strict = {method.spec.model for method in expert_methods(model).values()}
        for spec in strict - {None}:
            make_strict(model, spec)


def keep_weights_live(model: nn.Module) -> None:
    """Before vLLM repacks anything: give every layer outside the experts a method that does not."""
    for name, module in model.named_modules():
        if is_router(name, module):
            # Later versions' layer passes its method by on GPUs: for products that take BF16 weights, with sums of
            # their own.
            module.forward = MethodType(ReplicatedLinear.forward, module)
            module.quant_method = RouterMethod()
        elif isinstance(module, LinearBase):
            module.quant_method = LiveLinearMethod()
        elif isinstance(module, VocabParallelEmbedding):
            module.quant_method = LiveEmbeddingMethod()


class LiveLinearMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)


class RouterMethod(LiveLinearMethod):
    """Router logits in FP32 whatever the model's type: experts are chosen by their order."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.is_cuda and x.dtype is layer.weight.dtype is torch.bfloat16 and bias is None:
            # Products of BF16 numbers are exact in FP32, in which they are summed: nothing need be widened first.
            return torch.mm(x, layer.weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), layer.weight.float(), bias)


class LiveEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Of the embedding and of the output layer. The latter runs in FP32 by the model's `head_dtype`."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)

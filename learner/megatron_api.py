"""Everything that the learner uses of Megatron-core, in one place.

Importing it takes seconds, and warns about optional packages (Transformer Engine, Apex) that the learner
does without.

Megatron has `torch.compile` wrap its fused functions as it defines them, which loads all of PyTorch's compiler: a
third of the seconds. The learner calls none of these functions (`learner.model` turns fusions off, experts are its
own), so they stay as they are written; not so where Transformer Engine is installed, whose own functions it does call.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch


def _as_written(function: Any = None, **options: Any) -> Any:
    """`torch.compile`, or the decorator that it gives, with nothing compiled."""
    return (lambda decorated: decorated) if function is None else function


_uncompiled: AbstractContextManager[Any] = (
    nullcontext() if find_spec("transformer_engine") else patch.object(torch, "compile", _as_written)
)
with warnings.catch_warnings(), _uncompiled:
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
    )
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

__all__ = [
    "ColumnParallelLinear",
    "GPTModel",
    "MegatronModule",
    "MoELayer",
    "MoESubmodules",
    "MoETokenDispatcher",
    "ModuleSpec",
    "ProcessGroupCollection",
    "RotaryEmbedding",
    "RowParallelLinear",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "forward_backward_pipelining_without_interleaving",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_default_pg_collection",
    "get_gpt_layer_local_spec",
    "parallel_state",
    "transformer_engine_modules",
]


def transformer_engine_modules() -> tuple[str, type, type, type]:
    """Version of Transformer Engine, which must be installed, and Megatron's norm and linear layers made of it."""
    from megatron.core.extensions import transformer_engine as modules
    from megatron.core.utils import get_te_version

    layers = (modules.TENorm, modules.TEColumnParallelLinear, modules.TERowParallelLinear)
    return str(get_te_version()), *layers

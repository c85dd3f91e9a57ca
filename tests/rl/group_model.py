"""A model that is small enough to be shared by processes that start in seconds, and sequences for it."""

from __future__ import annotations

import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from rl.rollout import Sequences

MAP = PrecisionMap.resolve(2, named_spec("minite"), last_layers_bf16=1)
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 32,
}


def sequences() -> Sequences:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (6, 9), generator=generator)
    lengths = torch.tensor([9, 5, 7, 9, 3, 6])
    positions = torch.arange(9)
    mask = (positions >= 2) & (positions < lengths[:, None])
    logp = -3 + torch.rand(tokens.shape, generator=generator)
    return Sequences(tokens, lengths, mask, logp, torch.where(mask, 1, -1).int())

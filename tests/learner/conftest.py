"""Tiny models of both families, made once for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from learner.config import LearnerConfig
from learner.initialize import initialize
from learner.packing import Packing
from learner.trainable import Trainable

LAYERS, VOCAB = 2, 61
_COMMON = {
    "hidden_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "mixtral": {**_COMMON, "model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 64},
}

MakeFolder = Callable[..., Path]
Sequences = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """model_folder(family, **changes): a folder with that model, its norms moved away from one."""
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = f"{family}{sorted(changes.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("models") / "model"
            initialize(made[key], {**MODELS[family], **changes}, seed=0)
            _move_norms(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def sequences() -> Sequences:
    """tokens [6, 12], lengths, loss mask: right-padded, prompts of two tokens, one sequence without a
    response.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (6, 12), generator=generator)
    lengths = torch.tensor([12, 5, 9, 12, 3, 7])
    positions = torch.arange(12)
    mask = (positions >= 2) & (positions < lengths[:, None])
    mask[4] = False
    return tokens, lengths, mask


def precision_map(name: str) -> PrecisionMap:
    return PrecisionMap.resolve(LAYERS, named_spec(name))


def hidden_states(
    trainable: Trainable, tokens: torch.Tensor, routes: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, S, H] of tokens [B, S] without padding; routes: [B, S, layers, k]."""
    packing = Packing.of(torch.full((len(tokens),), tokens.shape[1]))
    packed = None if routes is None else packing.pack(routes)
    return packing.unpack(trainable.model.hidden_states(packing.pack(tokens), packing, packed))


def config(**changes: Any) -> LearnerConfig:
    return LearnerConfig(**{"lr": 1e-3, **changes})


def _move_norms(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(2)
    state = load_file(folder / "model.safetensors")
    for name, tensor in state.items():
        if tensor.dim() == 1:
            state[name] = tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

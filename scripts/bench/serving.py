"""Generation of fixed length with dummy weights: output tokens a second at several batch sizes, and memory of weights.

    PYTHONPATH=. python scripts/bench/serving.py                           # one GPU, the whole Qwen3-30B-A3B geometry
    PYTHONPATH=. python scripts/bench/serving.py --device cpu --layers 2 --hidden 64 --ffn 32 --experts 8 --heads 2 \\
        --vocab 256 --batches 1 4 --prompt 8 --output 8 --cache-gib 0.25 --repeats 1                # whether it works

Every request has a prompt of random tokens and writes exactly `--output` tokens. Ways, each in a process of its own:

    minite   the product's sampler under the specification `minite` (`--spec` for another)
    vllm     vLLM itself in BF16, with its own fused experts

Printed for each: bytes of weights, tokens that a cache in the rest of `--memory-gib` would hold, and for each batch
size the median of output tokens a second, beside the bound that memory sets (`rl.preflight.traffic`) where the device
is known.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from learner.families.architecture import Architecture
from learner.families.registry import family_of
from rl.devices import device_of
from rl.preflight.memory import cache_bytes_per_token
from rl.preflight.traffic import decode_bytes
from sampler.config import SamplerConfig, SamplingConfig

WAYS = ("minite", "vllm")
Generate = Callable[[list[list[int]], int], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--spec", default="minite")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    for name, default in (
        ("layers", 48), ("hidden", 2048), ("ffn", 768), ("experts", 128), ("top-k", 8), ("heads", 32),
        ("vocab", 151936), ("prompt", 128), ("output", 256), ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cache-gib", type=float, default=16.0)
    parser.add_argument("--memory-gib", type=float, help="of the device; default: what it says")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given, given.one)))
        return
    with tempfile.TemporaryDirectory() as folder:
        hf_config(given).save_pretrained(folder)
        rows = {way: in_process(way, folder) for way in given.ways}
    for way, row in rows.items():
        print_row(way, row, rows.get("vllm"))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))


def in_process(way: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", way, "--folder", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{way} failed")
    return json.loads(done.stdout.strip().splitlines()[-1])


def print_row(way: str, row: dict[str, Any], base: dict[str, Any] | None) -> None:
    print(
        f"{way} on {row['device']}: weights {row['weight_bytes'] / 2**30:.3g} GiB, experts by {row['backend']};"
        f" the rest of {row['memory_bytes'] / 2**30:.3g} GiB would hold {row['cache_tokens']:,} tokens"
    )
    for batch, rate in row["tokens_s"].items():
        parts = [f"  batch {batch:>4}: {rate:>10,.1f} output tokens/s"]
        if base is not None and way != "vllm":
            parts.append(f"{rate / base['tokens_s'][batch]:.2f} of vllm")
        bound = row["bounds"][batch]
        parts.append("bound: device not known" if bound is None else f"{rate / bound:.0%} of {bound:,.0f}")
        print("  ".join(parts))


def hf_config(given: argparse.Namespace) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=max(1, given.heads // 8),
        head_dim=128 if given.hidden >= 1024 else 32,
        num_experts=given.experts,
        num_experts_per_tok=min(given.top_k, given.experts // 2),
        moe_intermediate_size=given.ffn,
        norm_topk_prob=True,
        vocab_size=given.vocab,
        max_position_embeddings=32768,
        dtype="bfloat16",
    )


def measure(given: argparse.Namespace, way: str) -> dict[str, Any]:
    config = hf_config(given)
    model = family_of(config).read(config)
    length = given.prompt + given.output
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": length,
        "max_num_seqs": max(given.batches),
        "max_num_batched_tokens": max(length, given.prompt * max(given.batches), 2048),
        "kv_cache_gib": given.cache_gib,
    }
    if given.device == "cuda":
        settings["device"] = "cuda"
    sampler = SamplerConfig(**settings)
    spec = named_spec(given.spec if way == "minite" else "bf16")
    generate, weight_bytes, backend = (ours if way == "minite" else theirs)(given, model, sampler)
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    device = device_of(name)
    specs = PrecisionMap.resolve(model.layers, spec)
    rates, bounds = {}, {}
    for batch in given.batches:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(0, model.vocab, (batch, given.prompt), generator=generator).tolist()
        generate(prompts, given.output)
        times = []
        for _ in range(given.repeats):
            started = time.perf_counter()
            generate(prompts, given.output)
            times.append(time.perf_counter() - started)
        rates[batch] = batch * given.output / sorted(times)[given.repeats // 2]
        step = decode_bytes(model, specs, sampler, batch, given.prompt + given.output // 2)
        bounds[batch] = None if device is None else batch * device.bandwidth / step
    memory = memory_bytes(given)
    return {
        "device": name,
        "backend": backend,
        "weight_bytes": weight_bytes,
        "memory_bytes": memory,
        "cache_tokens": max(0, memory - weight_bytes) // cache_bytes_per_token(model, sampler, 1),
        "tokens_s": rates,
        "bounds": bounds,
    }


def memory_bytes(given: argparse.Namespace) -> int:
    if given.memory_gib is not None:
        return int(given.memory_gib * 2**30)
    if given.device == "cuda":
        return torch.cuda.mem_get_info()[1]
    import psutil

    return psutil.virtual_memory().total


def ours(given: argparse.Namespace, model: Architecture, config: SamplerConfig) -> tuple[Generate, int, str]:
    """The product's sampler. Its loader is given random tensors in place of a checkpoint's."""
    from sampler.engine import Sampler
    from sampler.environment import vllm_environment

    with vllm_environment(config):
        from sampler.loader import LiveWeightsLoader

    LiveWeightsLoader.get_all_weights = lambda *_: dummy_weights(model, given.device)  # type: ignore[method-assign]
    specs = PrecisionMap.resolve(model.layers, named_spec(given.spec))
    sampler = Sampler(given.folder, specs, config)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        seeds = [[index] for index in range(len(prompts))]
        found = sampler.generate(prompts, seeds, SamplingConfig(max_tokens=tokens))
        assert all(len(own.token_ids) == tokens for [own] in found)

    held = {**sampler.weights.tensors(), **sampler.weights.refresh()}
    return generate, storage_bytes(held.values()), sampler.report().backend


def theirs(
    given: argparse.Namespace, model: Architecture, config: SamplerConfig
) -> tuple[Generate, int, str]:
    """vLLM with its own dummy weights and experts, eager, as the product runs it."""
    from sampler.environment import vllm_environment

    with vllm_environment(config):
        from vllm import LLM, SamplingParams

        engine = LLM(
            model=str(given.folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
            enable_chunked_prefill=False,
            enforce_eager=True,
        )

    def generate(prompts: list[list[int]], tokens: int) -> None:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, seed=0)
        found = engine.generate(requests, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in found)

    [weights] = engine.apply_model(lambda module: storage_bytes(module.parameters()))
    return generate, weights, "vLLM"


def storage_bytes(tensors: Any) -> int:
    """Of memory behind tensors, counted once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def dummy_weights(model: Architecture, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Qwen3-MoE checkpoint by its name on disk, BF16."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16, device=device)

    yield "model.embed_tokens.weight", random(model.vocab, model.hidden)
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", ones(model.hidden)
        yield f"{at}.post_attention_layernorm.weight", ones(model.hidden)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{at}.self_attn.{name}_proj.weight", random(rows, model.hidden)
        yield f"{at}.self_attn.o_proj.weight", random(model.hidden, queries)
        for name in ("q", "k"):
            yield f"{at}.self_attn.{name}_norm.weight", ones(model.head_dim)
        yield f"{at}.mlp.gate.weight", random(model.experts, model.hidden)
        for expert in range(model.experts):
            own = f"{at}.mlp.experts.{expert}"
            yield f"{own}.gate_proj.weight", random(model.expert_ffn, model.hidden)
            yield f"{own}.up_proj.weight", random(model.expert_ffn, model.hidden)
            yield f"{own}.down_proj.weight", random(model.hidden, model.expert_ffn)
    yield "model.norm.weight", ones(model.hidden)
    yield "lm_head.weight", random(model.vocab, model.hidden)


if __name__ == "__main__":
    main()

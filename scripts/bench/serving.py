"""Generation of fixed length with dummy weights: output tokens a second at several batch sizes, and memory of weights.

    PYTHONPATH=. python scripts/bench/serving.py                           # one GPU, the whole Qwen3-30B-A3B geometry
    PYTHONPATH=. python scripts/bench/serving.py --device cpu --layers 2 --hidden 128 --ffn 128 --experts 8 --heads 4 \\
        --vocab 256 --batches 1 4 --prompt 8 --output 8 --cache-gib 0.25 --repeats 1                # whether it works

Ways, each in a process of its own, with the same random weights, prompts and settings of vLLM:

    minite   the product's sampler under the specification `minite` (`--spec` for another)
    vllm     vLLM itself in BF16, with its own fused experts

Both run decoding steps as CUDA graphs of exactly the batch sizes measured (`--eager`: without), uncompiled, with FP32
logits. Every request has a prompt of random tokens and writes exactly `--output` tokens, drawn at temperature 1:

    plain     nothing else is asked for
    rollout   a seed of its own for each response, and the log-probability of every token

Printed for each way: bytes of weights; tokens that a cache would hold in `--memory-share` of the GPU beside everything
else that the process has there; and for each batch size the best of `--repeats` in output tokens a second, prompt
included; milliseconds of a decoding step, prompt not included; the experts that a layer reads in a step, counted over
eager steps; the ratio to `vllm`; and the share of the bound that memory sets (`rl.preflight.traffic`, uniform routes).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from learner.families.architecture import Architecture
from learner.families.registry import family_of
from rl.devices import device_of
from rl.preflight.memory import cache_bytes_per_token
from rl.preflight.traffic import decode_bytes, experts_read
from sampler.config import SamplerConfig

WAYS, ASKED = ("minite", "vllm"), ("plain", "rollout")
Engine = tuple[Any, int, str]  # vLLM's, bytes of weights, what computes the experts
COUNTED = 8  # eager steps over which experts are counted


def main() -> None:
    given = parse()
    if given.one:
        result = measure(given, given.one)
        print(json.dumps(result), flush=True)
        os._exit(0)  # an engine takes seconds to end, and nothing is left to be done
    with tempfile.TemporaryDirectory() as folder:
        hf_config(given).save_pretrained(folder)
        found = {way: in_process(way, folder) for way in given.ways}
    rows = {way: row for way, row in found.items() if row is not None}
    for way, row in rows.items():
        print_row(way, row, rows.get("vllm"))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))
    if len(rows) < len(given.ways):
        sys.exit(f"failed: {', '.join(way for way in given.ways if way not in rows)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--spec", default="minite")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    for name, default in (
        ("layers", 48), ("hidden", 2048), ("ffn", 768), ("experts", 128), ("top-k", 8), ("heads", 32),
        ("vocab", 151936), ("prompt", 32), ("output", 128), ("repeats", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--cache-gib", type=float, default=8.0)
    parser.add_argument("--memory-share", type=float, default=0.9, help="of the GPU, for weights and cache")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    for name in ("layers", "prompt", "repeats"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(given, name)}")
    if given.output < 2:
        parser.error(f"--output must be at least 2, got {given.output}")
    return given


def in_process(way: str, folder: str) -> dict[str, Any] | None:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", way, "--folder", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(f"{way} failed:\n{done.stdout}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def print_row(way: str, row: dict[str, Any], base: dict[str, Any] | None) -> None:
    print(
        f"{way} on {row['device']}: weights {row['weight_bytes'] / 2**30:.2f} GiB, other memory"
        f" {row['other_bytes'] / 2**30:.2f} GiB, experts by {row['backend']}; in {row['memory_bytes'] / 2**30:.4g} GiB"
        f" the cache would hold {row['cache_tokens']:,} tokens; ready after {row['ready_s']:.0f} s,"
        f" done after {row['done_s']:.0f} s"
    )
    for batch, own in row["batches"].items():
        parts = [
            f"  batch {batch:>4}: {own['experts']:.1f} experts a layer and step (uniform: {own['uniform']:.1f})"
        ]
        for asked in ASKED:
            rate, step = own[asked]["tokens_s"], own[asked]["step_ms"]
            parts.append(f"{asked} {rate:,.1f} tokens/s, {step:.2f} ms a step")
            if base is not None and way != "vllm":
                theirs = base["batches"][batch][asked]
                parts[-1] += f" ({rate / theirs['tokens_s']:.2f} and {theirs['step_ms'] / step:.2f} of vllm)"
        bound, step = own["bound_ms"], own["plain"]["step_ms"]
        parts.append(
            "bound: device not known" if bound is None else f"bound {bound:.2f} ms, {bound / step:.0%}"
        )
        print("; ".join(parts))


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
    started = time.perf_counter()

    def say(what: str) -> None:
        print(f"[{way} {time.perf_counter() - started:6.1f} s] {what}", file=sys.stderr, flush=True)

    config = hf_config(given)
    model = family_of(config).read(config)
    settings = sampler_settings(given)
    engine, weight_bytes, backend = (ours if way == "minite" else theirs)(given, model, settings)
    ready = time.perf_counter() - started
    say(f"ready, {weight_bytes / 2**30:.2f} GiB of weights")
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    device = device_of(name)
    specs = PrecisionMap.resolve(model.layers, named_spec(given.spec if way == "minite" else "bf16"))
    batches: dict[int, Any] = {}
    for batch in given.batches:
        own = measure_batch(given, Asking(engine), model, batch)
        step = decode_bytes(model, specs, settings, batch, given.prompt + given.output // 2)
        own["bound_ms"] = None if device is None else 1e3 * step / device.bandwidth
        own["uniform"] = model.experts * experts_read(model, batch)
        batches[batch] = own
        say(f"batch {batch}: {own}")
    total, used = memory(given)
    other = max(0, used - weight_bytes - int(given.cache_gib * 2**30))
    share = int(given.memory_share * total)
    return {
        "device": name,
        "backend": backend,
        "weight_bytes": weight_bytes,
        "other_bytes": other,
        "memory_bytes": share,
        "cache_tokens": max(0, share - weight_bytes - other) // cache_bytes_per_token(model, settings, 1),
        "batches": batches,
        "ready_s": ready,
        "done_s": time.perf_counter() - started,
    }


def sampler_settings(given: argparse.Namespace) -> SamplerConfig:
    length, cuda = given.prompt + given.output, given.device == "cuda"
    most = max(given.batches)
    return SamplerConfig(
        device=given.device,
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=most,
        max_num_batched_tokens=max(length, most, min(8192, given.prompt * most)),
        kv_cache_gib=given.cache_gib,
        prefix_caching=False,
        cuda_graph_sizes=tuple(sorted(given.batches)) if cuda and not given.eager else (),
    )


class Asking:
    """An engine of vLLM, and how it is asked."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        [self.runner] = engine.collective_rpc(lambda worker: worker.model_runner)

    def generate(self, prompts: list[list[int]], tokens: int, asked: str) -> None:
        from vllm import SamplingParams

        rollout = asked == "rollout"
        more = {"logprobs": 0, "flat_logprobs": True} if rollout else {}
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                seed=index if rollout else None,
                **more,
            )
            for index in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self._engine.generate(requests, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in found)

    def seconds(self, prompts: list[list[int]], tokens: int, asked: str) -> float:
        started = time.perf_counter()
        self.generate(prompts, tokens, asked)
        return time.perf_counter() - started


def measure_batch(
    given: argparse.Namespace, engine: Asking, model: Architecture, batch: int
) -> dict[str, Any]:
    """Seconds of whole generations and of prompts alone, by what is asked for; and the experts in use."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, model.vocab, (batch, given.prompt), generator=generator).tolist()
    found: dict[str, Any] = {}
    engine.generate(prompts, given.output, "plain")  # warms up
    for asked in ASKED:
        engine.generate(prompts, 2, asked)
        first = min(engine.seconds(prompts, 1, asked) for _ in range(given.repeats))
        whole = min(engine.seconds(prompts, given.output, asked) for _ in range(given.repeats))
        step = (whole - first) / (given.output - 1)
        found[asked] = {"tokens_s": batch * given.output / whole, "step_ms": 1e3 * step}
    found["experts"] = experts_in_use(engine, prompts, model.experts_per_token, given)
    return found


def experts_in_use(engine: Asking, prompts: list[list[int]], top_k: int, given: argparse.Namespace) -> float:
    """Different experts that one layer computes in one decoding step: the mean over layers and steps."""
    from sampler.graphs import eagerly

    counts: list[torch.Tensor] = []

    def count(_: torch.nn.Module, args: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        if len(logits) == len(prompts):  # no prompt: those are longer
            chosen = torch.zeros(logits.shape[1], device=logits.device)
            counts.append(chosen.index_fill_(0, logits.topk(top_k).indices.flatten(), 1).sum())

    gates = [
        module for name, module in engine.runner.get_model().named_modules() if name.endswith(".mlp.gate")
    ]
    assert len(gates) == given.layers
    hooks = [gate.register_forward_hook(count) for gate in gates]
    with nullcontext() if given.eager or given.device == "cpu" else eagerly(engine.runner):
        engine.generate(prompts, min(COUNTED + 1, given.output), "plain")
    for hook in hooks:
        hook.remove()
    return float(torch.stack(counts).mean())


def memory(given: argparse.Namespace) -> tuple[int, int]:
    """Of the device, and of it what is in use; on a CPU what this process has."""
    if given.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total, total - free
    import psutil

    return psutil.virtual_memory().total, psutil.Process().memory_info().rss


def ours(given: argparse.Namespace, model: Architecture, config: SamplerConfig) -> Engine:
    """The product's sampler. Its loader is given random tensors in place of a checkpoint's."""
    from sampler.engine import Sampler
    from sampler.environment import vllm_environment

    with vllm_environment(config):
        from sampler.loader import LiveWeightsLoader

    LiveWeightsLoader.get_all_weights = lambda *_: dummy_weights(model, given.device)  # type: ignore[method-assign]
    specs = PrecisionMap.resolve(model.layers, named_spec(given.spec))
    sampler = Sampler(given.folder, specs, config)
    held = {**sampler.weights.tensors(), **sampler.weights.refresh()}
    backend = f"{sampler.report().backend} in {sampler.weights.layout}"
    return sampler._llm, storage_bytes(held.values()), backend


def theirs(given: argparse.Namespace, model: Architecture, config: SamplerConfig) -> Engine:
    """vLLM with its own experts, and with the same tensors and settings as the product's sampler."""
    from sampler.environment import vllm_environment
    from sampler.graphs import graph_settings
    from sampler.launch import ON_A_GPU
    from sampler.model_check import BLOCK_SIZE

    with vllm_environment(config):
        from vllm import LLM
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        DefaultModelLoader.get_all_weights = lambda *_: dummy_weights(model, given.device)  # type: ignore[method-assign]
        engine = LLM(
            model=str(given.folder),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
            enable_prefix_caching=False,
            block_size=BLOCK_SIZE,
            enable_chunked_prefill=False,
            logprobs_mode="processed_logprobs",
            hf_overrides={"head_dtype": "float32"},
            **graph_settings(config.cuda_graph_sizes),
            **(ON_A_GPU if given.device == "cuda" else {}),
        )
    [weights] = engine.apply_model(lambda module: storage_bytes(module.parameters()))
    return engine, weights, "vLLM"


def storage_bytes(tensors: Any) -> int:
    """Of memory behind tensors, counted once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def dummy_weights(model: Architecture, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Qwen3-MoE checkpoint by its name on disk, BF16; the same numbers in every call."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return empty.normal_(std=0.02, generator=generator)

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
        w13 = random(model.experts, 2, model.expert_ffn, model.hidden)
        w2 = random(model.experts, model.hidden, model.expert_ffn)
        for expert in range(model.experts):
            own = f"{at}.mlp.experts.{expert}"
            yield f"{own}.gate_proj.weight", w13[expert, 0]
            yield f"{own}.up_proj.weight", w13[expert, 1]
            yield f"{own}.down_proj.weight", w2[expert]
    yield "model.norm.weight", ones(model.hidden)
    yield "lm_head.weight", random(model.vocab, model.hidden)


if __name__ == "__main__":
    main()

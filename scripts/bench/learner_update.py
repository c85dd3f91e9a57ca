"""A complete update of the learner: forward, loss, backward, clipping, AdamW, and the weights quantised anew.

    PYTHONPATH=. python scripts/bench/learner_update.py                    # one GPU, Qwen3-30B-A3B's width
    PYTHONPATH=. python scripts/bench/learner_update.py --device cpu --layers 2 --hidden 64 --ffn 32 --experts 8 \\
        --heads 4 --vocab 256 --tokens 512 --mean 64 --longest 128 --micro-batch 128 --repeats 2   # whether it works

Random weights, 4 layers of width 2048 with 128 experts (top-8, FFN 768), vocabulary and attention as Qwen3-30B-A3B
has them. Sequences are packed: as long as a file of lengths says (one a line), or drawn from a log-normal distribution
of the given mean, cut at the longest. Ways, each in a process of its own:

    minite   the product's own path under the specification `minite`
    bf16     no quantisation: PyTorch's grouped products and a fused SwiGLU, with the same backward (`pipelines.Bf16`)
    naive    one scale a tensor and each step a pass of its own, with the same backward (`pipelines.Unfused`)

On a CPU all three are the reference back end (specs minite, bf16, te_per_tensor): that shows that the script runs, and
compares nothing. Printed: tokens a second, the ratio to bf16, model FLOPs utilisation where `rl.devices` knows the
device, and peak memory beside what the preflight's arithmetic says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kernels.backends import ExpertKernels
from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from learner.batch import TrainBatch
from learner.config import LearnerConfig, ObjectiveConfig
from learner.layout import Layout
from learner.moe import Experts
from learner.policy import Policy
from rl.devices import device_of
from rl.flops import update_flops
from rl.preflight.memory import learner_memory

WAYS = {"minite": "minite", "bf16": "bf16", "naive": "te_per_tensor"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    for name, default in (
        ("layers", 4), ("hidden", 2048), ("ffn", 768), ("experts", 128), ("top-k", 8), ("heads", 32), ("vocab", 151936),
        ("tokens", 131072), ("mean", 1024), ("longest", 8192), ("micro-batch", 16384), ("repeats", 5),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=Path, help="of sequences, one a line, repeated as needed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given, given.one)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(given, Path(folder) / "model")
        rows = {way: in_process(way, folder) for way in given.ways}
    for way, row in rows.items():
        print(line(way, row, rows.get("bf16")))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))


def in_process(way: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", way, "--folder", f"{folder}/model"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{way} failed")
    return json.loads(done.stdout.strip().splitlines()[-1])


def line(way: str, row: dict[str, Any], base: dict[str, Any] | None) -> str:
    parts = [
        f"{way:<7} {row['tokens_s']:>10,.0f} tokens/s  {row['seconds']:.3f} s an update of {row['tokens']:,} tokens"
    ]
    if base is not None:
        parts.append(f"{row['tokens_s'] / base['tokens_s']:.2f} of bf16")
    parts.append("MFU: device not known" if row["mfu"] is None else f"MFU {row['mfu']:.1%}")
    if row["peak_bytes"] is not None:
        parts.append(
            f"peak {row['peak_bytes'] / 2**30:.1f} GiB, arithmetic {row['planned_bytes'] / 2**30:.1f} GiB"
        )
    return "  ".join([*parts, f"experts by {row['backend']}, {row['device']}"])


def make_model(given: argparse.Namespace, folder: Path) -> None:
    """Random BF16 weights, drawn on the device."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
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
    )
    with torch.device(given.device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def sequence_lengths(given: argparse.Namespace) -> torch.Tensor:
    """int64, of as many sequences as `--tokens` hold."""
    if given.lengths is not None:
        known = torch.tensor([int(row) for row in given.lengths.read_text().split()])
        drawn = known.repeat(-(-given.tokens // int(known.sum())))
    else:
        sigma = 0.7
        normal = torch.randn(given.tokens, generator=torch.Generator().manual_seed(0))
        drawn = (given.mean * (sigma * normal - sigma**2 / 2).exp()).long()
    drawn = drawn.clamp(2, min(given.longest, given.micro_batch))
    return drawn[: max(1, int((drawn.cumsum(0) <= given.tokens).sum()))]


def random_batch(lengths: torch.Tensor, vocab: int) -> TrainBatch:
    """A fifth of each sequence is its prompt."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(lengths), int(lengths.max()))
    positions = torch.arange(shape[1])
    mask = (positions >= (lengths // 5).clamp(min=1)[:, None]) & (positions < lengths[:, None])
    logp = torch.full(shape, -float(torch.tensor(vocab).log()))
    tokens = torch.randint(0, vocab, shape, generator=generator)
    return TrainBatch(tokens, lengths, mask, logp, logp, torch.randn(len(lengths), generator=generator))


def measure(given: argparse.Namespace, way: str) -> dict[str, Any]:
    """Seconds of one update by `way`, the median, and what it took."""
    lengths = sequence_lengths(given)
    batch = random_batch(lengths, given.vocab)
    if given.device == "cuda" and way != "minite":
        import learner_ways

        replace_kernels(learner_ways.kernels(way))
    specs = PrecisionMap.resolve(given.layers, named_spec(WAYS[way] if given.device == "cpu" else "minite"))
    if given.device == "cuda" and way == "bf16":
        specs = PrecisionMap.resolve(given.layers, named_spec("bf16"))
    config = LearnerConfig(dtype="bfloat16", device=given.device, micro_batch_tokens=given.micro_batch)
    policy = Policy(given.folder, specs, config, seed=0)
    times = []
    for _ in range(given.repeats + 1):
        synchronise(given.device)
        started = time.perf_counter()
        policy.update(batch, ObjectiveConfig(), temperature=1.0)
        synchronise(given.device)
        times.append(time.perf_counter() - started)
    seconds = sorted(times[1:])[given.repeats // 2]
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    device = device_of(name)
    tokens = int(lengths.sum())
    operations = update_flops(policy.architecture, lengths.tolist(), int(batch.loss_mask.sum()))
    backend = (
        "reference"
        if given.device == "cpu"
        else "triton_emulated"
        if device is None
        else device.expert_backend
    )
    planned = learner_memory(policy.architecture, specs, config, Layout(), backend=backend)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_s": tokens / seconds,
        "mfu": None if device is None else operations / seconds / device.bf16,
        "peak_bytes": torch.cuda.max_memory_allocated() if given.device == "cuda" else None,
        "planned_bytes": planned.total - planned.standing.get("GPU context", 0),
        "backend": policy.report().backend,
        "device": name,
    }


def replace_kernels(kernels: ExpertKernels) -> None:
    Experts._kernels = lambda self, spec: kernels  # type: ignore[method-assign]


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

"""A complete update of the learner (forward, loss, backward, clipping, AdamW, the weights quantised anew) and the score
before it.

    PYTHONPATH=. python scripts/bench/learner_update.py                    # one GPU, Qwen3-30B-A3B's width
    PYTHONPATH=. python scripts/bench/learner_update.py --device cpu --layers 2 --hidden 64 --ffn 32 --experts 8 \\
        --heads 4 --vocab 256 --tokens 512 --mean 64 --longest 128 --micro-batch 128 --repeats 2   # whether it works

Random weights, 4 layers of width 2048 with 128 experts (top-8, FFN 768) and attention as Qwen3-30B-A3B has them; of its
48 layers that is a twelfth, and so is the vocabulary (12,672 of 151,936), for the share that the output layer has of
the whole model's time. Sequences are packed: as long as a file of lengths says (one a line), or drawn from a log-normal
distribution of the given mean, cut at the longest. Ways, one after another in one learner with the same masters:

    minite   the specification `minite`
    bf16     the specification `bf16`: PyTorch's grouped products
    te       the specification `te_per_tensor`, the naive recipe: one scale a tensor, each step a pass of its own, the
             gradient's products quantised too
    unfused  the same composition of the forward under `minite`'s formulas (`pipelines.Unfused`), the gradient in BF16
             as under `minite`: what fusing alone gains. On a GPU only

The first three are the product's own paths, by the back ends that are printed; on a CPU all are the reference, which
compares nothing. Printed: tokens a second of score and update together, the ratio to bf16 and of minite to every way,
stage times, model FLOPs utilisation where `rl.devices` knows the device, and memory beside what the preflight's
arithmetic (`rl.preflight.memory`) says of a learner with the largest micro-batch that occurs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.backends import ExpertKernels
from kernels.catalogue import named_spec
from kernels.precision_map import PrecisionMap
from learner.batch import TrainBatch, cut
from learner.config import LearnerConfig, ObjectiveConfig
from learner.policy import Policy
from rl.devices import Device, device_of
from rl.flops import forward_flops, update_flops
from rl.preflight.memory import Memory, bare_learner_memory

_QUANTISE = "quantise (in score)"  # of an update, did nothing score before it
WAYS = {"minite": "minite", "bf16": "bf16", "te": "te_per_tensor", "unfused": "minite"}  # their specs
RATIOS = {"score and update": ("score", "update"), "update alone": ("update", _QUANTISE)}
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    for name, default in (
        ("layers", 4), ("hidden", 2048), ("ffn", 768), ("experts", 128), ("top-k", 8), ("heads", 32), ("vocab", 12672),
        ("tokens", 131072), ("mean", 1024), ("longest", 8192), ("micro-batch", 65536), ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=Path, help="of sequences, one a line, repeated as needed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    started = time.perf_counter()
    lengths = sequence_lengths(given)
    with tempfile.TemporaryDirectory() as folder:
        make_model(given, Path(folder) / "model")
        config = LearnerConfig(dtype="bfloat16", device=given.device, micro_batch_tokens=given.micro_batch)
        policy = Policy(Path(folder) / "model", specs_of(given.ways[0], given.layers), config, seed=0)
    print(f"{describe(given, lengths)}; ready after {time.perf_counter() - started:.0f} s", flush=True)
    rows = {}
    for way in given.ways:
        if way == "unfused" and given.device == "cpu":
            continue
        rows[way] = measure(given, policy, lengths, way)
        print(text_of(way, rows[way], rows.get("bf16")), flush=True)
    if "minite" in rows:
        for what, parts in RATIOS.items():
            print(f"minite's tokens a second, {what}: {ratios(rows, parts)}")
        print(f"in all {time.perf_counter() - started:.0f} s")
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))


def ratios(rows: dict[str, dict[str, Any]], parts: Sequence[str]) -> str:
    """Of minite's speed in these stages to every other way's."""
    seconds = {way: sum(row["stages"][part] for part in parts) for way, row in rows.items()}
    own = seconds.pop("minite")
    return ", ".join(f"{other / own:.2f} of {way}" for way, other in seconds.items())


def describe(given: argparse.Namespace, lengths: torch.Tensor) -> str:
    experts = f"{given.experts} experts of {given.ffn}"
    model = f"{given.layers} layers, width {given.hidden}, {experts}, vocabulary {given.vocab:,}"
    ordered = lengths.sort().values
    quartiles = [int(ordered[int(share * (len(ordered) - 1))]) for share in (0, 0.5, 0.9, 1)]
    return (
        f"{model}; {len(lengths)} sequences, {int(lengths.sum()):,} tokens, lengths"
        f" min/median/P90/max {'/'.join(map(str, quartiles))}, {len(cut(lengths, given.micro_batch))} micro-batches"
    )


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
    if given.device == "cuda":
        torch.cuda.empty_cache()


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


def specs_of(way: str, layers: int) -> PrecisionMap:
    return PrecisionMap.resolve(layers, named_spec(WAYS[way]))


class Stages:
    """Seconds by stage, of calls that are watched. On a GPU by events, so that nothing waits for the device."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self._spans: list[tuple[str, Any, Any]] = []

    def mark(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def watch(self, owner: Any, method: str, stage: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            start = self.mark()
            result = original(*arguments, **keywords)
            self._spans.append((stage, start, self.mark()))
            return result

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        if self.gpu:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for stage, start, end in self._spans:
            own = start.elapsed_time(end) / 1000 if self.gpu else end - start
            total[stage] = total.get(stage, 0.0) + own
        self._spans.clear()
        return total


def measure(given: argparse.Namespace, policy: Policy, lengths: torch.Tensor, way: str) -> dict[str, Any]:
    """Seconds of score and update by `way`, the median update's stages, and the memory that it took."""
    gpu = given.device == "cuda"
    batch, specs = random_batch(lengths, given.vocab), specs_of(way, given.layers)
    for experts in policy.model.experts():
        experts.__dict__.pop("_kernels", None)
        experts.compute_under(named_spec(WAYS[way]))
        if way == "unfused":
            experts._kernels = lambda spec: unfused()  # type: ignore[method-assign]
    if gpu:
        torch.cuda.empty_cache()
    stages = watched(policy, gpu)
    times = []
    for _ in range(given.repeats + 1):
        if gpu:
            torch.cuda.synchronize()
            standing = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        policy.score(batch.tokens, batch.lengths, batch.loss_mask, temperature=1.0)
        score = stages.take()  # waits for the device
        between = time.perf_counter()
        policy.update(batch, ObjectiveConfig(), temperature=1.0)
        found = stages.take()
        times.append(split(score, found, between - started, time.perf_counter() - between))
    unwatch(policy)
    middle = sorted(times[1:], key=lambda row: row["score"] + row["update"])[given.repeats // 2]
    tokens, scored = int(lengths.sum()), int(batch.loss_mask.sum())
    seconds = middle["score"] + middle["update"]
    name = torch.cuda.get_device_name() if gpu else "cpu"
    device = device_of(name)
    model, spans = policy.architecture, lengths.tolist()
    operations = forward_flops(model, spans, scored) + update_flops(model, spans, scored)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "stages": middle,
        "tokens_s": tokens / seconds,
        "mfu": None if device is None else operations / seconds / device.bf16,
        "memory": memory(given, policy, lengths, specs, standing, device) if gpu else None,
        "backend": next(iter(policy.model.experts())).backend,
        "device": name,
    }


def watched(policy: Policy, gpu: bool) -> Stages:
    stages = Stages(gpu)
    stages.watch(policy, "_hidden", "forward")
    stages.watch(policy, "_token_scores", "log-probabilities")
    for method in ("reduce", "step"):
        stages.watch(policy.optimizer, method, "optimiser")
    for experts in policy.model.experts():
        stages.watch(experts, "_current", "quantise")
    return stages


def unwatch(policy: Policy) -> None:
    for owner in (policy, policy.optimizer, *policy.model.experts()):
        for method in ("_hidden", "_token_scores", "reduce", "step", "_current"):
            owner.__dict__.pop(method, None)


def split(
    score: dict[str, float], update: dict[str, float], score_s: float, update_s: float
) -> dict[str, float]:
    """Seconds of each stage. What an update does beside those that are watched is its backward pass. Weights are
    quantised in the first pass after a step, the score's.
    """
    own = {"score": score_s, "update": update_s, _QUANTISE: score.get("quantise", 0.0)}
    own["forward"] = update["forward"]
    own["log-probabilities"] = update["log-probabilities"]
    own["optimiser"] = update["optimiser"]
    own["backward"] = update_s - own["forward"] - own["log-probabilities"] - own["optimiser"]
    return own


def memory(
    given: argparse.Namespace,
    policy: Policy,
    lengths: torch.Tensor,
    specs: PrecisionMap,
    standing: int,
    device: Device | None,
) -> dict[str, Any]:
    """Bytes measured, of the last repetition, and planned."""
    largest = max(int(lengths[rows].sum()) for rows in cut(lengths, given.micro_batch))
    backend = "triton_emulated" if device is None else device.expert_backend
    planned: Memory = bare_learner_memory(policy.architecture, specs, policy.config, largest, backend=backend)
    return {
        "standing": standing,
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "largest_micro_batch": largest,
        "planned_standing": planned.standing,
        "planned_working": planned.working,
    }


def unfused() -> ExpertKernels:
    from learner_ways import UNFUSED

    return UNFUSED


def text_of(way: str, row: dict[str, Any], base: dict[str, Any] | None) -> str:
    parts = [
        f"{way:<7} {row['tokens_s']:>9,.0f} tokens/s  {row['seconds']:.3f} s for {row['tokens']:,} tokens",
        "" if base is None else f"{row['tokens_s'] / base['tokens_s']:.2f} of bf16",
        "MFU: device not known" if row["mfu"] is None else f"MFU {row['mfu']:.1%}",
        f"experts by {row['backend']}, {row['device']}",
    ]
    lines = ["  ".join(part for part in parts if part)]
    lines.append("        " + ", ".join(f"{name} {s:.3f} s" for name, s in row["stages"].items()))
    if row["memory"] is not None:
        own = row["memory"]
        standing = sum(own["planned_standing"].values())
        total = standing + sum(own["planned_working"].values())
        lines.append(
            f"        memory: standing {own['standing'] / GIB:.2f} GiB, planned {standing / GIB:.2f}; peak"
            f" {own['peak'] / GIB:.2f} GiB, planned {total / GIB:.2f} ({total / own['peak'] - 1:+.1%} of the peak);"
            f" reserved {own['reserved'] / GIB:.2f} GiB; largest micro-batch {own['largest_micro_batch']:,} tokens"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""What AdamW changes in packed experts, and what the delta codec makes of it.

    python scripts/bench/delta.py data=gsm8k data.path=FILE [group.key=value ...] [--steps 1 10 100] [--lr 1e-6]

Takes recipe smollm2's model (SmolLM2-135M-Instruct, every FFN upcycled to experts) with FP32 masters, and does AdamW
steps of the language-model loss on the prompts of the data in the real learner, whose forward and backward passes run
under spec `bf16` (under `minite` every step would quantise all experts: hours on two cores); what is exported is packed
under `--spec`. Printed, for each number of steps since the base: the share of bytes that changed, of BF16 operands,
codes, block scales and outer scales; the bytes of the encoding as a share of the packed tensors; and the rates of
encoding and decoding, in bytes of packed tensors a second. Whatever is decoded is compared with the new tensors.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path

import torch

from kernels.catalogue import named_spec
from kernels.digest import byte_view
from kernels.experts import split_wire_name
from kernels.precision_map import PrecisionMap
from learner.policy import Policy
from rl.compose import load_config
from rl.models import initial_model, model_architecture
from rl.sync.codecs.delta import Delta
from rl.task import Task, own_tokenizer, problem_source
from rl.validate import resolve_maps

Tensors = dict[str, torch.Tensor]
ROWS, WIDTH = 4, 64  # of a batch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--spec", default="minite", help="under which the experts are packed")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(["+recipe=smollm2", "spec=bf16", *arguments.overrides])
    source = problem_source(config.data, config.run.seed)
    cache = Path(config.run.cache_dir)
    model = initial_model(config.model, own_tokenizer(source, cache), config.run.seed, cache)
    layers = model_architecture(model).layers
    precision_map, _ = resolve_maps(config.spec, layers)
    packed = PrecisionMap.resolve(layers, named_spec(arguments.spec))
    task = Task(config, source, model)
    policy = Policy(model, precision_map, config.learner, config.run.seed)
    base, operands = experts(policy.export(packed)), experts(policy.export_operands(packed))
    size = sum(map(nbytes, base.values()))
    print(
        f"{model.name}, packed under {arguments.spec}, lr {arguments.lr}, {ROWS * WIDTH} tokens a step:"
        f" {len(base)} tensors of {size / 2**20:.1f} MiB",
        flush=True,
    )
    print(
        f"{'steps':>6s} {'bf16':>9s} {'codes':>9s} {'block':>9s} {'outer':>9s} {'encoded':>9s} {'encode':>11s}",
        end="",
    )
    print(f" {'decode':>11s} {'loss':>8s} {'s/step':>7s}", flush=True)
    loss, spent = float("nan"), 0.0
    for step in range(1, max(arguments.steps) + 1):
        started = time.perf_counter()
        loss = policy.supervised_step(*batch(task, step), lr=arguments.lr)
        spent += time.perf_counter() - started
        if step in arguments.steps:
            new = experts(policy.export(packed))
            shares = changed(operands, experts(policy.export_operands(packed))) | changed(base, new)
            print(
                f"{step:6d} {shares['weight']:9.4%} {shares['codes']:9.4%} {shares['block_scales']:9.4%}",
                end="",
            )
            print(
                f" {shares['outer_scales']:9.4%} {cost(base, new, size)} {loss:8.4f} {spent / step:7.1f}",
                flush=True,
            )


def batch(task: Task, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of the recipe's prompts, one after another, all of them to be predicted but the first."""
    tokens: list[int] = []
    position = step * 1000
    while len(tokens) < ROWS * WIDTH:
        tokens += task.prompts.training(position).token_ids
        position += 1
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    mask[:, 0] = False
    return torch.tensor(tokens[: ROWS * WIDTH]).view(ROWS, WIDTH), torch.full((ROWS,), WIDTH), mask


def experts(exported: object) -> Tensors:
    """Copies of the expert tensors."""
    return {name: tensor.clone() for name, tensor in exported if split_wire_name(name)}  # type: ignore[attr-defined]


def changed(old: Tensors, new: Tensors) -> dict[str, float]:
    """Kind of tensor -> share of its bytes that differ."""
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, tensor in new.items():
        count = counts[name.rpartition(".")[2]]
        count[0] += int((byte_view(old[name]) != byte_view(tensor)).sum())
        count[1] += nbytes(tensor)
    return {kind: differing / total for kind, (differing, total) in counts.items()}


def cost(base: Tensors, new: Tensors, size: int) -> str:
    """Encoded share, and both rates; the codec's result is checked."""
    codec, held = Delta(), {name: tensor.clone() for name, tensor in base.items()}
    started = time.perf_counter()
    pieces = {name: codec.encode(name, tensor, base[name]) for name, tensor in new.items()}
    encoding = time.perf_counter() - started
    staged = {name: (piece, byte_view(content)) for name, (piece, content) in pieces.items()}
    started = time.perf_counter()
    codec.install(staged, held, ())
    decoding = time.perf_counter() - started
    wrong = [
        name for name, tensor in new.items() if not torch.equal(byte_view(held[name]), byte_view(tensor))
    ]
    if wrong:
        raise AssertionError(f"decoded tensors differ: {wrong}")
    encoded = sum(piece.nbytes for piece, _ in pieces.values())
    return f"{encoded / size:9.4%} {size / encoding / 2**20:6.0f} MiB/s {size / decoding / 2**20:6.0f} MiB/s"


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    main()

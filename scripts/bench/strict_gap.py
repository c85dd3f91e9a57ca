r"""The gap between the engines, and their speed, over ways to schedule the same requests.

    python scripts/bench/strict_gap.py +recipe=smollm2_strict algorithm.sampling.max_tokens=128 \
        sampler.max_model_len=256
    python scripts/bench/strict_gap.py --ways 32 +recipe=smollm2 ...     # the same under the practical spec
    options: --prompts N (32), --ways NAMES (all), --few N: prompts of ways below 32 (7), --alone N: of the way `1` (2)
             --folder FOLDER: keep responses there, and take those that are there already; --update: a step as well

A way is the number of sequences that are decoded together, with `+chunks` (prompts cut, of 48 tokens a pass at most)
and `-cache` (no prefix cache) behind it. Each runs in a process of its own on the first prompts of the recipe's data,
one response each; another process scores all responses with the learner, twice, in micro-batches of two sizes. The
table has max, mean and P99 of |delta logp|, how many responses are those of the first way, bit for bit, and tokens per
second of processor time, all threads together, which other work on the machine disturbs little: of responses for the
sampler, of whole sequences for the learner.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl.compose import load_config
from rl.plan import Plan, make_plan

WAYS = ("32", "32+chunks", "32-cache", "7", "7+chunks-cache", "1")
SMALL_BATCH = 512  # tokens of a micro-batch, or as many as the longest sequence may have
CHUNK = 48


def main() -> None:
    parser = argparse.ArgumentParser(description="The gap between the engines over ways to schedule.")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--few", type=int, default=7)
    parser.add_argument("--alone", type=int, default=2)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--sample", help=argparse.SUPPRESS)  # in a process of its own: this way
    parser.add_argument("--score", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path)
    options, overrides = parser.parse_known_args()
    plan = make_plan(load_config(overrides))
    if options.sample:
        sample(plan, options, options.folder)
    elif options.score:
        score(plan, options, options.folder)
    else:
        run_all(plan, options)


def run_all(plan: Plan, options: argparse.Namespace) -> None:
    config, own = plan.config, [sys.executable, *sys.argv]
    spec, dtype, threads = config.spec.name, config.sampler.dtype, config.sampler.threads
    print(
        f"spec {spec}, {dtype}, {threads or 'all'} threads, load average {os.getloadavg()[0]:.1f}", flush=True
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for way in options.ways.split(","):
            if not (folder / f"{way}.pt").exists():
                subprocess.run([*own, "--folder", str(folder), "--sample", way], check=True)
        subprocess.run([*own, "--folder", str(folder), "--score"], check=True)


def sample(plan: Plan, options: argparse.Namespace, folder: Path) -> None:
    from sampler.engine import Sampler

    way = options.sample
    together = int(way.partition("+")[0].partition("-")[0])
    most = options.alone if together == 1 else options.few if together < 32 else options.prompts
    count = min(most, options.prompts)
    changes: dict[str, Any] = {"max_num_seqs": together, "prefix_caching": "-cache" not in way}
    if "+chunks" in way:
        changes |= {"chunked_prefill": True, "max_num_batched_tokens": CHUNK}
    sampler = Sampler(plan.model, plan.sampler_map, replace(plan.config.sampler, **changes))
    prompts = [plan.task.prompts.training(number).token_ids for number in range(count)]
    seeds = [[number] for number in range(count)]
    sampling = replace(plan.config.algorithm.sampling, stop_token_ids=())
    sampler.generate(prompts[:1], seeds[:1], replace(sampling, max_tokens=2))  # what is made when first used
    started = time.process_time()
    responses = sampler.generate(prompts, seeds, sampling)
    seconds = time.process_time() - started
    rows = [
        (list(prompt), list(own[0].token_ids), list(own[0].logp))
        for prompt, own in zip(prompts, responses, strict=True)
    ]
    torch.save({"rows": rows, "seconds": seconds}, folder / f"{way}.pt")
    print(
        f"{way}: sampled {sum(len(row[1]) for row in rows)} tokens in {seconds:.1f} s of processor time",
        flush=True,
    )


def score(plan: Plan, options: argparse.Namespace, folder: Path) -> None:
    from learner.batch import TrainBatch
    from learner.policy import Policy

    config = plan.config
    small = max(SMALL_BATCH, config.sampler.max_model_len)
    policies = {
        size: Policy(plan.model, plan.learner_map, replace(config.learner, micro_batch_tokens=size), seed=0)
        for size in {small, max(8192, small)}
    }
    temperature = config.algorithm.sampling.temperature
    print(
        f"{'way':>16} {'micro-batch':>11} {'tokens':>7} {'max':>9} {'mean':>9} {'P99':>9} {'sampler/s':>9}",
        end="",
    )
    print(f" {'score/s':>8} {'equal to the first':>19}")
    first: dict[int, tuple[list[int], list[float]]] = {}
    for way in options.ways.split(","):
        saved = torch.load(folder / f"{way}.pt")
        tokens, lengths, mask, sampled = _padded(saved["rows"])
        equal = sum(first.setdefault(number, row[1:]) == row[1:] for number, row in enumerate(saved["rows"]))
        for size, policy in policies.items():
            started = time.process_time()
            scores = policy.score(tokens, lengths, mask, temperature)
            seconds = time.process_time() - started
            gap = (scores.logp - sampled)[mask].abs().double()
            numbers = f"{gap.max():9.2e} {gap.mean():9.2e} {gap.quantile(0.99):9.2e}"
            speeds = f"{len(gap) / saved['seconds']:9.1f} {int(lengths.sum()) / seconds:8.1f}"
            print(
                f"{way:>16} {size:11d} {len(gap):7d} {numbers} {speeds} {equal:>10} of {len(lengths)}",
                flush=True,
            )
    if not options.update:
        return
    advantages = torch.ones(len(lengths)).index_fill(0, torch.arange(0, len(lengths), 2), -1.0)
    batch = TrainBatch(tokens, lengths, mask, scores.logp, sampled, advantages)
    started = time.process_time()
    metrics = policy.update(batch, config.algorithm.objective, temperature)
    seconds = time.process_time() - started
    print(
        f"update: {int(lengths.sum()) / seconds:.1f} tokens/s of processor time; mean |log ratio| before it"
        f" {metrics['log_ratio_abs']!r}"
    )


def _padded(rows: list[tuple[list[int], list[int], list[float]]]) -> tuple[torch.Tensor, ...]:
    """Tokens int64 [B, S], lengths [B], loss mask [B, S] and the sampler's log-probabilities float32 [B, S]."""
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response, _ in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    mask, sampled = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(tokens.shape)
    for number, (prompt, response, logp) in enumerate(rows):
        end = int(lengths[number])
        tokens[number, :end] = torch.tensor(prompt + response)
        mask[number, len(prompt) : end] = True
        sampled[number, len(prompt) : end] = torch.tensor(logp)
    return tokens, lengths, mask, sampled


if __name__ == "__main__":
    main()

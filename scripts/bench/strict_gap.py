r"""The gap between the engines, and their speed, over ways to schedule the same requests.

    python scripts/bench/strict_gap.py +recipe=smollm2_strict algorithm.sampling.max_tokens=128 \
        sampler.max_model_len=256
    python scripts/bench/strict_gap.py --specs strict,minite --ways 32 --update +recipe=tiny ...     # what it costs
    options: --prompts N (32), --samples N: responses of each (1), --ways NAMES (all), --specs NAMES (the recipe's)
             --few N, --alone N: prompts of ways below 32 (7), and of the way `1` (2)
             --micro-batches NAMES: tokens of the learner's (512,8192), at least those of one sequence
             --folder FOLDER: keep responses and scores there, and take those that are there already
             --at-once: start all processes together; what is timed takes turns. --update: time a step as well

A way is the number of sequences that are decoded together, with `+chunks` (prompts cut, of 48 tokens a pass at most)
and `-cache` (no prefix cache) behind it. Each runs in a process of its own on the first prompts of the recipe's data;
another process scores all responses with the learner, in micro-batches of each size. A response that was scored is not
scored again, as where two ways give the same one. The table has max, mean and P99 of |delta logp|, how many responses
are those of the first way, bit for bit, and tokens a second, of responses for the sampler, of whole sequences for the
learner: on a CPU of processor time, all threads together, which other work disturbs little. Exit status 1 where a
strict spec leaves a gap, or a response that depends on its way.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.catalogue import named_spec
from rl.compose import load_config
from rl.plan import Plan, make_plan
from rl.quiet import silence_libraries

WAYS = ("32", "32+chunks", "32-cache", "7", "7+chunks-cache", "1")
CHUNK = 48
TITLES = (
    "way",
    "micro-batch",
    "tokens",
    "max",
    "mean",
    "P99",
    "sampler/s",
    "score/s",
    "equal to the first",
)
Row = tuple[list[int], list[int], list[float]]  # prompt, response, its log-probabilities


def main() -> None:
    parser = argparse.ArgumentParser(description="The gap between the engines over ways to schedule.")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--few", type=int, default=7)
    parser.add_argument("--alone", type=int, default=2)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--specs", default="")
    parser.add_argument("--micro-batches", default="512,8192")
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--sample", help=argparse.SUPPRESS)  # in a process of its own: this way
    parser.add_argument("--score", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path)
    options, overrides = parser.parse_known_args()
    silence_libraries()
    if options.sample:
        sample(make_plan(load_config(overrides)), options)
    elif options.score:
        sys.exit(score(make_plan(load_config(overrides)), options))
    elif options.folder:
        sys.exit(run_all(options, overrides, options.folder))
    else:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(run_all(options, overrides, Path(folder)))


def run_all(options: argparse.Namespace, overrides: list[str], root: Path) -> int:
    """Sample under every spec in every way, then score; the exit status."""
    runs: dict[str, list[str]] = {}
    for spec in options.specs.split(","):
        own = [*overrides, *([f"spec={spec}"] if spec else [])]
        config = make_plan(load_config(own)).config  # makes the model, once for all processes
        folder = root / config.spec.name
        folder.mkdir(parents=True, exist_ok=True)
        runs[config.spec.name] = [sys.executable, *sys.argv, *own[len(overrides) :], f"--folder={folder}"]
    about = f"{config.sampler.device}, {config.sampler.dtype}, load average {os.getloadavg()[0]:.1f}"
    print(f"specs {', '.join(runs)}; {about}", flush=True)
    todo = [
        [*run, f"--sample={way}"]
        for spec, run in runs.items()
        for way in ways_of(spec, options)
        if not (root / spec / f"{way}.pt").exists()
    ]
    statuses = _statuses(todo, options.at_once)
    statuses += _statuses([[*run, "--score"] for run in runs.values()], options.at_once)
    return max(statuses)


def ways_of(spec: str, options: argparse.Namespace) -> list[str]:
    """A spec that is not strict cannot cut prompts."""
    return [way for way in options.ways.split(",") if "+chunks" not in way or named_spec(spec).strict]


def _statuses(commands: Sequence[list[str]], at_once: bool) -> list[int]:
    if not at_once:
        return [subprocess.run(command).returncode for command in commands]
    return [process.wait() for process in [subprocess.Popen(command) for command in commands]]


@contextmanager
def turn(options: argparse.Namespace) -> Iterator[None]:
    """Inside, no other process of the same root measures anything."""
    with (options.folder.parent / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def clock(device: str) -> float:
    """Seconds: of this process's threads on a CPU, by the wall where a GPU does the work."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def sample(plan: Plan, options: argparse.Namespace) -> None:
    from sampler.engine import Sampler

    way, config = options.sample, plan.config
    together = int(way.partition("+")[0].partition("-")[0])
    most = options.alone if together == 1 else options.few if together < 32 else options.prompts
    count = min(most, options.prompts)
    changes: dict[str, Any] = {"max_num_seqs": together, "prefix_caching": "-cache" not in way}
    if "+chunks" in way:
        changes |= {"chunked_prefill": True, "max_num_batched_tokens": max(CHUNK, together)}
    sampler = Sampler(plan.model, plan.sampler_map, replace(config.sampler, **changes))
    prompts = [plan.task.prompts.training(number).token_ids for number in range(count)]
    seeds = [[number * options.samples + k for k in range(options.samples)] for number in range(count)]
    sampling = replace(config.algorithm.sampling, stop_token_ids=())
    device = config.sampler.device
    warm = 1 if device == "cpu" else count  # what is made or compiled when it is first used
    sampler.generate(prompts[:warm], seeds[:warm], replace(sampling, max_tokens=2))
    with turn(options):
        started = clock(device)
        responses = sampler.generate(prompts, seeds, sampling)
        seconds = clock(device) - started
    rows = [
        (list(prompt), list(response.token_ids), list(response.logp))
        for prompt, own in zip(prompts, responses, strict=True)
        for response in own
    ]
    torch.save({"rows": rows, "seconds": seconds}, options.folder / f"{way}.pt")
    tokens = sum(len(response) for _, response, _ in rows)
    print(f"{config.spec.name} {way}: sampled {tokens} tokens in {seconds:.1f} s", flush=True)


def score(plan: Plan, options: argparse.Namespace) -> int:
    """Prints the table; 1 where a strict spec is not."""
    from learner.policy import Policy

    config, strict = plan.config, plan.learner_map.model is not None
    longest, temperature = config.sampler.max_model_len, config.algorithm.sampling.temperature
    sizes = sorted({max(int(size), longest) for size in options.micro_batches.split(",")})
    policies = {
        size: Policy(plan.model, plan.learner_map, replace(config.learner, micro_batch_tokens=size), seed=0)
        for size in sizes
    }
    scorers = {
        size: Scorer(policy, size, temperature, config.learner.device, options)
        for size, policy in policies.items()
    }
    lines, first, wrong, most = [TITLES], {}, False, []
    for way in ways_of(config.spec.name, options):
        if not (options.folder / f"{way}.pt").exists():
            print(f"{config.spec.name} {way}: there are no responses", flush=True)
            wrong = True
            continue
        saved = torch.load(options.folder / f"{way}.pt")
        rows: list[Row] = saved["rows"]
        most = max(most, rows, key=len)
        equal = sum(first.setdefault(number, row[1:]) == row[1:] for number, row in enumerate(rows))
        sampled = torch.tensor([value for _, _, logp in rows for value in logp])
        for size, scorer in scorers.items():
            logp, speed = scorer.of(rows)
            gap = (logp - sampled).abs().double()
            wrong |= strict and (float(gap.max()) != 0.0 or equal != len(rows))
            numbers = [f"{value:.2e}" for value in (gap.max(), gap.mean(), gap.quantile(0.99))]
            rate = f"{len(gap) / saved['seconds']:.1f}"
            lines.append((way, str(size), str(len(gap)), *numbers, rate, speed, f"{equal} of {len(rows)}"))
    print(f"\n{config.spec.name}")
    for line in lines:
        print(
            " ".join(f"{cell:>{width}}" for cell, width in zip(line, (16, 11, 7, *[9] * 5, 19), strict=True))
        )
    if options.update and most:
        print(update(plan, policies[max(sizes)], scorers[max(sizes)], most, options))
    sys.stdout.flush()
    return int(wrong)


class Scorer:
    """The learner's log-probabilities of responses, in micro-batches of one size, each response once."""

    def __init__(
        self, policy: Any, size: int, temperature: float, device: str, options: argparse.Namespace
    ) -> None:
        self._policy, self._temperature, self._device, self._options = policy, temperature, device, options
        self._file = options.folder / f"scores_{size}.pt"
        self._known: dict[tuple[int, ...], list[float]] = (
            torch.load(self._file) if self._file.exists() else {}
        )

    def of(self, rows: Sequence[Row]) -> tuple[torch.Tensor, str]:
        """Of all response tokens, row after row, float32; and tokens a second, if any had to be scored."""
        unknown = {_key(row): row for row in rows if _key(row) not in self._known}
        speed = ""
        if unknown:
            tokens, lengths, mask, _ = padded(list(unknown.values()))
            if self._device != "cpu":  # what is compiled when it is first used
                self._policy.score(tokens[:8], lengths[:8], mask[:8], self._temperature)
            with turn(self._options):
                started = clock(self._device)
                logp = self._policy.score(tokens, lengths, mask, self._temperature).logp.cpu()
                speed = f"{int(lengths.sum()) / (clock(self._device) - started):.1f}"
            for key, own, here in zip(unknown, logp, mask, strict=True):
                self._known[key] = own[here].tolist()
            torch.save(self._known, self._file)
        return torch.tensor([value for row in rows for value in self._known[_key(row)]]), speed


def update(plan: Plan, policy: Any, scorer: Scorer, rows: Sequence[Row], options: argparse.Namespace) -> str:
    """One optimiser step on all responses, every other one rewarded."""
    from learner.batch import TrainBatch

    config = plan.config
    tokens, lengths, mask, sampled = padded(rows)
    old = torch.zeros(mask.shape).masked_scatter(mask, scorer.of(rows)[0])
    advantages = torch.ones(len(lengths)).index_fill(0, torch.arange(0, len(lengths), 2), -1.0)
    batch = TrainBatch(tokens, lengths, mask, old, sampled, advantages)
    device = config.learner.device
    with turn(options):
        started = clock(device)
        metrics = policy.update(batch, config.algorithm.objective, config.algorithm.sampling.temperature)
        seconds = clock(device) - started
    rate = int(lengths.sum()) / seconds
    return f"update: {rate:.1f} tokens/s; mean |log ratio| before it {metrics['log_ratio_abs']!r}"


def _key(row: Row) -> tuple[int, ...]:
    prompt, response, _ = row
    return (len(prompt), *prompt, *response)


def padded(rows: Sequence[Row]) -> tuple[torch.Tensor, ...]:
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

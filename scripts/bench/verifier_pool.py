"""Throughput and soundness of the verifier pool on answers of which some hang, crash, eat memory or cannot be computed.

    python scripts/bench/verifier_pool.py --answers 10000 --workers 2

Prints what became of every kind of answer, answers per second, and the state of the pool afterwards. Exit status 1 when
a score is missing, belongs to another answer, or the pool is not whole.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rl.data.problem import Problem
from rl.rewards.pool import RewardPool
from rl.rewards.registry import load_reward
from rl.rewards.score import Score

Sample = tuple[str, str, Problem]  # kind, response, problem

FATAL = ("hang", "hang in C", "segfault", "exit", "eat memory", "raise")
ADVERSARIAL = {
    "tower of powers": r"Answer: 9^{9^{9^9}}",
    "factorial": r"Answer: (10^9)!",
    "long sum": r"Answer: \sum_{k=1}^{10^{12}} \frac{1}{k}",
    "open braces": "Answer: " + "{" * 250,
    "nested roots": "Answer: " + r"\sqrt{" * 40 + "2" + "}" * 40,
    "many numbers": "9,0," * 20_000,
    "echo": "The last line is of the form Answer: $Answer",
    "empty": "",
    "NUL": "Answer: \0",
    "half a surrogate pair": "Answer: \ud83d",
}
SPELLINGS = (
    "{}",
    "${}$",
    r"\boxed{{{}}}",
    "= {}",
    "{}.0",
    "{}.",
    r"\text{{{}}}",
    r"\frac{{{}}}{{1}}",
    "x = {}",
)


def workload(count: int, odd_share: float, seed: int) -> list[Sample]:
    """`count` answers in random order; every odd kind is the same share of them."""
    draw = random.Random(seed)
    odd = [(kind, kind) for kind in FATAL] + list(ADVERSARIAL.items())
    copies = max(1, round(count * odd_share / len(odd)))
    samples = [(kind, text, _problem(draw)) for kind, text in odd for _ in range(copies)]
    while len(samples) < count:
        problem, kind = _problem(draw), draw.choice(("right", "wrong"))
        shown = int(problem.answer) + (kind == "wrong")
        samples.append((kind, f"Some steps.\nAnswer: {draw.choice(SPELLINGS).format(shown)}", problem))
    draw.shuffle(samples)
    return samples


def _problem(draw: random.Random) -> Problem:
    return Problem(str(draw.getrandbits(64)), "q", str(draw.randrange(100_000)), "bench")


def outcome(score: Score) -> str:
    return "error" if score.error else "right" if score.correct else "wrong"


def misjudged(samples: list[Sample], scores: list[Score]) -> list[str]:
    """Kinds of the answers whose score cannot be theirs."""
    expected = {"right": {"right"}, "wrong": {"wrong"}} | {kind: {"error"} for kind in FATAL}
    return [
        kind
        for (kind, _, _), score in zip(samples, scores, strict=True)
        if outcome(score) not in expected.get(kind, {"wrong", "error"})
    ]


def report(samples: list[Sample], scores: list[Score], seconds: float) -> None:
    table = Counter((kind, outcome(score)) for (kind, _, _), score in zip(samples, scores, strict=True))
    for kind in sorted({kind for kind, _ in table}):
        found = ", ".join(f"{count} {end}" for (name, end), count in sorted(table.items()) if name == kind)
        print(f"  {kind:24} {found}")
    print(f"{len(scores)} answers in {seconds:.1f} s: {len(scores) / seconds:.0f} answers/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds")
    parser.add_argument("--memory", type=int, default=1024, help="MiB of address space of a process")
    parser.add_argument("--odd", type=float, default=0.008, help="share of answers that misbehave")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    samples = workload(options.answers, options.odd, options.seed)
    plain = [sample for sample in samples if sample[0] in ("right", "wrong")][: options.answers // 5]
    reward = load_reward("misbehaving_reward:verify")
    with RewardPool(reward, options.workers, options.timeout, memory_mib=options.memory) as pool:
        scores, seconds = timed(pool, samples)
        report(samples, scores, seconds)
        after, plain_seconds = timed(pool, plain)
        processes = len(psutil.Process().children(recursive=True))
    wrong = misjudged(samples, scores) + misjudged(plain, after)
    print(f"ordinary answers alone, afterwards: {len(plain) / plain_seconds:.0f} answers/s")
    print(
        f"processes afterwards: {processes} of {options.workers}; misjudged: {len(wrong)} {Counter(wrong) or ''}"
    )
    return int(bool(wrong) or processes != options.workers or len(scores) != len(samples))


def timed(pool: RewardPool, samples: list[Sample]) -> tuple[list[Score], float]:
    started = time.perf_counter()
    scores = pool.score([(response, problem) for _, response, problem in samples])
    return scores, time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())

"""How often 95 % intervals of the gap hold the truth, on synthetic prompts that are more or less alike.

    python scripts/bench/gap_coverage.py [--sets 200]

d ~ Normal(0, s) for the tokens of a prompt, with log s ~ Normal(log 0.1, spread): the truth is known in closed form, or
by integration. Prints, for each spread and number of prompts, the share of data sets whose interval holds it.
"""

from __future__ import annotations

import argparse

import numpy as np
import scipy.integrate
import scipy.optimize
import scipy.stats

from rl.diagnosis.statistics import STATISTICS, Bootstrap, Bounds, Clustered, Weighted

SPREADS, PROMPTS, TOKENS, RESAMPLES = (0.2, 0.3, 0.5, 0.8), (32, 64, 128), (100, 300), 400


def synthetic(seed: int, prompts: int, spread: float) -> Clustered:
    generator = np.random.default_rng(seed)
    scales = 0.1 * np.exp(spread * generator.standard_normal(prompts))
    numbers = np.repeat(np.arange(prompts), generator.integers(*TOKENS, prompts))
    return Clustered(scales[numbers] * generator.standard_normal(len(numbers)), numbers)


def truth(spread: float) -> dict[str, float]:
    def beyond(x: float) -> float:
        def tail(z: float) -> float:
            return 2 * scipy.stats.norm.sf(x / (0.1 * np.exp(spread * z))) * scipy.stats.norm.pdf(z)

        return scipy.integrate.quad(tail, -8, 8, limit=200)[0]

    p99 = scipy.optimize.brentq(lambda x: beyond(x) - 0.01, 0.05, 5.0)
    return {"abs_mean": 0.1 * np.exp(spread**2 / 2) * np.sqrt(2 / np.pi), "p99": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description="Coverage of the intervals of a diagnosis.")
    parser.add_argument("--sets", type=int, default=200, help="data sets for each row (%(default)s)")
    sets = parser.parse_args().sets
    print("spread  prompts  mean of |d|  P99 of |d|")
    for spread in SPREADS:
        true = truth(spread)
        for prompts in PROMPTS:
            held = dict.fromkeys(true, 0)
            for seed in range(sets):
                data = synthetic(seed, prompts, spread)
                weighted, bootstrap = Weighted(data, Bounds()), Bootstrap(RESAMPLES)
                draws = bootstrap.draws(prompts)
                for name, value in true.items():
                    values = np.array([STATISTICS[name](weighted, times) for times in draws])
                    low, high = bootstrap.interval(values)
                    held[name] += low <= value <= high
            shares = [f"{100 * held[name] / sets:>10.0f} %" for name in ("abs_mean", "p99")]
            print(f"{spread:>6}  {prompts:>7} {'  '.join(shares)}", flush=True)


if __name__ == "__main__":
    main()

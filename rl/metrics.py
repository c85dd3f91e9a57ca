"""The table of metrics: every number that a run records has its name, meaning, unit and reducer here.

A name that is not in the table is refused, so that terminal, metrics.jsonl, W&B and report can never
disagree. `volatile` marks what depends on the machine's mood (time, rate, memory): every other metric of an
interrupted and resumed run equals that of the run that was not interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from types import MappingProxyType

from rl.evaluation.benchmarks import BENCHMARKS, SPECS
from rl.expert_load import LAYERS


class Reducer(StrEnum):
    """How the values of one step become the value of that step."""

    ONCE = "once"  # a statistic of all tokens of the step at once; several values cannot be combined
    FIRST = "first"
    LAST = "last"
    MEAN = "mean"
    TOKEN_MEAN = "token_mean"  # mean weighted by tokens
    SUM = "sum"
    MAX = "max"
    MIN = "min"


class UnknownMetric(ValueError):
    """A name that the table does not have."""


@dataclass(frozen=True)
class Metric:
    """One row of the table. `unit` is empty for pure numbers; shares and rates lie in [0, 1]."""

    name: str
    meaning: str
    unit: str
    reducer: Reducer
    section: str
    volatile: bool


ONCE, FIRST, LAST, MEAN, TOKEN_MEAN, SUM, MAX = (
    Reducer.ONCE,
    Reducer.FIRST,
    Reducer.LAST,
    Reducer.MEAN,
    Reducer.TOKEN_MEAN,
    Reducer.SUM,
    Reducer.MAX,
)

# section -> rows of (name, reducer, unit, meaning). The gap of a token is its log-probability under the
# learner before the update minus that under the sampler; the ratio is its exponential.
_TABLE: dict[str, list[tuple[str, Reducer, str, str]]] = {
    "reward": [
        ("reward/mean", MEAN, "", "mean reward of the sampled responses, before groups are filtered"),
        ("reward/accuracy", MEAN, "share", "sampled responses that are right"),
        ("reward/error_rate", MEAN, "share", "responses whose verifier failed or timed out"),
        (
            "reward/trained",
            MEAN,
            "",
            "mean reward in the update: after shaping and a KL penalty in the reward",
        ),
        ("reward/overlong_penalty", MEAN, "", "mean penalty on length in the update, zero or less"),
        ("reward/kl_penalty", MEAN, "", "mean KL penalty that a response of the update pays"),
    ],
    "held_out": [
        ("held_out/reward", MEAN, "", "mean reward on the held-out problems"),
        ("held_out/accuracy", MEAN, "share", "held-out responses that are right"),
        ("held_out/error_rate", MEAN, "share", "held-out responses whose verifier failed or timed out"),
        ("held_out/length_mean", MEAN, "tokens", "mean length of the held-out responses"),
        ("held_out/truncated", MEAN, "share", "held-out responses cut off at the token limit"),
    ],
    "groups": [
        ("groups/kept", SUM, "groups", "groups that went into the update"),
        ("groups/drawn", SUM, "groups", "groups that were sampled"),
        ("groups/rounds", SUM, "rounds", "rounds of sampling until enough groups were kept"),
        ("groups/dropped_constant", SUM, "groups", "groups dropped because all rewards were equal"),
        ("groups/dropped_error", SUM, "groups", "groups dropped because a verifier failed"),
    ],
    "response": [
        ("response/length_mean", MEAN, "tokens", "mean length of the sampled responses"),
        ("response/length_max", MAX, "tokens", "longest sampled response"),
        ("response/truncated", MEAN, "share", "responses cut off at the token limit"),
        ("response/left_out", MEAN, "share", "responses of the update that are kept out of the loss"),
    ],
    "gap": [
        ("gap/mean", ONCE, "nat", "mean gap"),
        ("gap/abs_mean", ONCE, "nat", "mean absolute gap"),
        ("gap/p50", ONCE, "nat", "median absolute gap"),
        ("gap/p90", ONCE, "nat", "90th percentile of the absolute gap"),
        ("gap/p99", ONCE, "nat", "99th percentile of the absolute gap"),
        ("gap/p999", ONCE, "nat", "99.9th percentile of the absolute gap"),
        ("gap/max", ONCE, "nat", "largest absolute gap"),
        ("gap/beyond_clip", ONCE, "share", "tokens whose ratio leaves the clip range by numerics alone"),
        ("gap/ratio_mean", ONCE, "", "mean importance ratio learner / sampler; 1 when they agree"),
        ("gap/k3", ONCE, "nat", "k3 estimate of KL(sampler || learner)"),
        ("gap/ess", ONCE, "share", "effective sample size of the ratios, as a share of the tokens"),
        (
            "gap/older_abs_mean",
            ONCE,
            "nat",
            "mean absolute gap of tokens that no other row is about: by older weights than the samplers had last",
        ),
        ("gap/outside_nucleus", ONCE, "share", "tokens that the learner would not draw under top-p"),
        (
            "gap/route_mismatch",
            ONCE,
            "share",
            "tokens x layers for which the learner's routers choose other experts",
        ),
    ],
    "correction": [
        ("correction/weight_mean", ONCE, "", "mean importance weight of the tokens in the loss"),
        ("correction/weight_max", ONCE, "", "largest importance weight"),
        ("correction/ess", ONCE, "share", "effective sample size of the weights, as a share of the tokens"),
        ("correction/clipped", ONCE, "share", "tokens whose importance weight is cut to the cap"),
        ("correction/rejected", ONCE, "share", "tokens with weight 0, by whichever rule"),
        ("correction/token_rejected", ONCE, "share", "tokens whose ratio leaves the token band"),
        (
            "correction/sequence_rejected",
            ONCE,
            "share",
            "sequences whose mean ratio leaves the sequence band",
        ),
        ("correction/vetoed", ONCE, "share", "sequences with a ratio below the veto"),
    ],
    "policy": [
        ("policy/loss", TOKEN_MEAN, "", "loss of an update; mean over updates weighted by their tokens"),
        ("policy/grad_norm", MEAN, "", "global L2 norm of the gradient before clipping"),
        ("policy/lr", LAST, "", "learning rate of the last update"),
        ("policy/entropy", TOKEN_MEAN, "nat", "entropy of the learner's next-token distribution"),
        ("policy/ratio_mean", TOKEN_MEAN, "", "mean probability ratio new / old policy"),
        (
            "policy/log_ratio_abs",
            FIRST,
            "nat",
            "mean |log of that ratio| in the first mini-batch, before a weight changed: 0 under a strict spec",
        ),
        (
            "policy/clip_low_share",
            TOKEN_MEAN,
            "share",
            "tokens without gradient because of the lower clip bound",
        ),
        (
            "policy/clip_high_share",
            TOKEN_MEAN,
            "share",
            "tokens without gradient because of the upper clip bound",
        ),
        ("policy/approx_kl", TOKEN_MEAN, "nat", "k3 estimate of KL(old || new policy)"),
        (
            "policy/dual_clip_share",
            TOKEN_MEAN,
            "share",
            "tokens without gradient because of the dual clip",
        ),
        ("policy/reference_kl", TOKEN_MEAN, "nat", "estimated KL(new || reference policy), with a KL loss"),
    ],
    "critic": [
        ("critic/loss", TOKEN_MEAN, "", "loss of an update of the critic"),
        (
            "critic/explained_variance",
            ONCE,
            "",
            "1 - variance(return - value before the update) / variance(return)",
        ),
        ("critic/value_mean", TOKEN_MEAN, "", "mean value of a state"),
        ("critic/return_mean", TOKEN_MEAN, "", "mean return, which the values should be"),
        ("critic/value_error", TOKEN_MEAN, "", "mean squared difference of value and return"),
        (
            "critic/value_clip_share",
            TOKEN_MEAN,
            "share",
            "tokens without gradient because of the bound on the change of a value",
        ),
        ("critic/grad_norm", MEAN, "", "global L2 norm of the critic's gradient before clipping"),
        ("critic/lr", LAST, "", "learning rate of the critic's last update"),
    ],
    "sync": [
        ("sync/bytes", SUM, "bytes", "bytes of weights sent to each sampler"),
        (
            "sync/changed_share",
            ONCE,
            "share",
            "bytes that differ from those of the version before, of all that a sampler holds; with sync.codec=delta",
        ),
        ("sync/tensors", SUM, "tensors", "tensors sent to each sampler"),
        (
            "data/epoch",
            LAST,
            "",
            "passes through the training problems so far, the prompts of dropped groups included",
        ),
        ("version/weights", LAST, "", "version of the oldest weights that wrote responses of the update"),
    ],
    "staleness": [
        ("staleness/mean", ONCE, "versions", "weight versions that a response token is behind the learner"),
        ("staleness/max", MAX, "versions", "the most that a response token is behind the learner"),
        (
            "staleness/older_tokens",
            ONCE,
            "share",
            "response tokens of the update by older weights than the newest that wrote any",
        ),
    ],
    "partial": [
        ("partial/token_budget", LAST, "tokens", "the most that a response grows by in a round of sampling"),
        ("partial/continued", SUM, "responses", "responses that were put aside before and went on"),
        ("partial/put_aside", LAST, "responses", "unfinished responses that were put aside behind the batch"),
        ("partial/put_aside_tokens", LAST, "tokens", "tokens of the groups of which they are"),
        ("partial/waiting", LAST, "groups", "complete groups that the batch had no room for"),
    ],
    "tokens": [
        ("tokens/generated", SUM, "tokens", "response tokens sampled"),
        ("tokens/trained", SUM, "tokens", "response tokens in the loss mask"),
        ("tokens/learner", SUM, "tokens", "tokens of prompts and responses that the learner learns from"),
        ("work/forward", SUM, "FLOP", "operations of one forward pass over them; see `rl.flops`"),
    ],
    "experts": [
        (
            "experts/active",
            ONCE,
            "share",
            "experts that a token was sent to in the scoring pass, over all layers",
        ),
        ("experts/load_max", ONCE, "", "most tokens that an expert got, relative to the mean of its layer"),
        (
            "experts/load_cv",
            ONCE,
            "",
            "standard deviation of the tokens of a layer's experts, relative to their mean; mean over layers",
        ),
    ],
    "time": [
        ("time/generate", SUM, "s", "sampling; one step off: waiting for it"),
        ("time/reward", SUM, "s", "scoring the responses"),
        ("time/overlapped", SUM, "s", "one step off: sampling and scoring behind the update before"),
        ("time/score", SUM, "s", "log-probabilities under the learner before the update"),
        ("time/update", SUM, "s", "optimiser steps"),
        ("time/sync", SUM, "s", "weight sync"),
        ("time/sync_gather", SUM, "s", "of it, weights outside the experts brought into their order"),
        ("time/sync_quantise", SUM, "s", "of it, experts quantised, where no forward pass has done so"),
        ("time/sync_send", SUM, "s", "of it, sending, beyond what gathering and quantising hide"),
        (
            "time/sync_install",
            SUM,
            "s",
            "of it, live tensors replaced and derived ones made, by the slowest sampler",
        ),
        ("time/sync_attest", SUM, "s", "of it, hashing what is held, by the slowest of learner and samplers"),
        ("time/evaluate", SUM, "s", "evaluation on the held-out problems"),
        ("time/checkpoint", SUM, "s", "writing the checkpoint"),
        ("time/iteration", SUM, "s", "the whole iteration"),
        ("rate/tokens_per_second", ONCE, "tokens/s", "tokens generated per second of the whole iteration"),
        ("rate/generate", ONCE, "tokens/s", "response tokens a second of sampling, of one rank of a sampler"),
        ("rate/score", ONCE, "tokens/s", "tokens a second of scoring, of one rank of the learner"),
        ("rate/update", ONCE, "tokens/s", "tokens a second of the updates, of one rank of the learner"),
    ],
    "usage": [
        (
            "usage/score_mfu",
            ONCE,
            "share",
            "of the device's dense BF16 rate in the scoring pass; see `rl.flops`",
        ),
        ("usage/update_mfu", ONCE, "share", "of the device's dense BF16 rate in the updates; see `rl.flops`"),
        ("usage/decode_bandwidth", ONCE, "share", "of the device's memory bandwidth in sampling, estimated"),
        ("usage/install_bandwidth", ONCE, "share", "of it while a sync is installed"),
        ("usage/restarts", LAST, "", "samplers started again for one that died, so far in this launch"),
    ],
    "memory": [
        ("memory/driver", MAX, "MiB", "peak resident memory of the driver"),
        ("memory/learner", MAX, "MiB", "peak resident memory of the learner"),
        ("memory/sampler", MAX, "MiB", "peak resident memory of the largest sampler"),
        ("memory/weight_sync", MAX, "MiB", "peak resident memory of the weight sync"),
        ("memory/reference", MAX, "MiB", "peak resident memory of the reference policy"),
        ("memory/critic", MAX, "MiB", "peak resident memory of the critic"),
        ("memory/learner_gpu", MAX, "MiB", "peak GPU memory of the learner's tensors"),
        ("memory/sampler_gpu", MAX, "MiB", "peak GPU memory of a sampler's tensors, without what can sleep"),
        ("memory/gpu_offloaded", MAX, "MiB", "GPU memory that a learner still holds when it has left"),
    ],
}
# Of each benchmark under each spec: benchmark/NAME/SPEC/QUANTITY. The score is the metric that stands for the
# benchmark: avg@k, or IFEval's strict share of prompts.
_BENCHMARK_ROWS = [
    ("score", ONCE, "share", "score"),
    ("score_low", ONCE, "share", "lower end of the interval of the score"),
    ("score_high", ONCE, "share", "upper end of the interval of the score"),
    ("difference", ONCE, "", "score under the first spec minus score under this one"),
    ("difference_low", ONCE, "", "lower end of the interval of the difference"),
    ("difference_high", ONCE, "", "upper end of the interval of the difference"),
    ("error_rate", ONCE, "share", "responses whose verifier failed or timed out"),
    ("truncated", ONCE, "share", "responses cut off at the token limit"),
    ("length_mean", ONCE, "tokens", "mean length of the responses"),
]
_TABLE["benchmark"] = [
    (f"benchmark/{name}/{spec}/{quantity}", reducer, unit, f"{name} under {spec}: {meaning}")
    for name in BENCHMARKS
    for spec in SPECS
    for quantity, reducer, unit, meaning in _BENCHMARK_ROWS
]
# Of each layer, numbered from 000; see `rl.expert_load`.
for _layer in range(LAYERS):
    _TABLE["experts"] += [
        (f"experts/active/{_layer:03d}", ONCE, "experts", f"experts with any token in layer {_layer}"),
        (
            f"experts/load/{_layer:03d}",
            ONCE,
            "",
            f"largest load of an expert over the mean load in layer {_layer}",
        ),
    ]
_VOLATILE_SECTIONS = {"time", "memory", "usage"}


def _rows() -> Iterator[Metric]:
    for section, rows in _TABLE.items():
        for name, reducer, unit, meaning in rows:
            yield Metric(name, meaning, unit, reducer, section, section in _VOLATILE_SECTIONS)


METRICS: Mapping[str, Metric] = MappingProxyType({row.name: row for row in _rows()})


def metric(name: str) -> Metric:
    """The row of the table called `name`. Raises UnknownMetric."""
    try:
        return METRICS[name]
    except KeyError:
        raise UnknownMetric(f"no metric is called {name!r}; the table is in rl/metrics.py") from None


def number(name: str, value: object) -> float | int:
    """`value` (Python, NumPy or torch scalar) as the Python number that metric `name` has.

    Raises UnknownMetric; TypeError for what is not one real number; ValueError for infinity and NaN.
    """
    metric(name)
    item = getattr(value, "item", None)  # NumPy and torch scalars, and arrays of one element
    try:
        plain = item() if callable(item) else value
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"metric {name}: {value!r} is not one number") from error
    if isinstance(plain, bool) or not isinstance(plain, Real):
        raise TypeError(f"metric {name}: {value!r} is not a number")
    plain = int(plain) if isinstance(plain, Integral) else float(plain)
    if not math.isfinite(plain):
        raise ValueError(f"metric {name}={plain}: must be finite")
    return plain


def numbers(metrics: Mapping[str, object]) -> dict[str, float | int]:
    """`number` of every entry."""
    return {name: number(name, value) for name, value in metrics.items()}


def reduce(name: str, values: Iterable[object], weights: Sequence[object] | None = None) -> float | int:
    """The value of metric `name` for a step, from the step's `values`, by the reducer of the table.

    `weights` (non-negative, one a value) are tokens; only TOKEN_MEAN needs them and the other reducers ignore
    them, so that one call fits every metric of an update. Sums are correctly rounded: the order of values
    does not matter.

    Raises what `number` raises; ValueError for no values, several values of a ONCE metric, missing weights,
    or weights that are negative, of another count, or all zero.
    """
    found = [number(name, value) for value in values]
    if not found:
        raise ValueError(f"metric {name}: nothing to reduce")
    match metric(name).reducer:
        case Reducer.ONCE:
            if len(found) != 1:
                raise ValueError(
                    f"metric {name}: {len(found)} values, but it is computed once for the whole step"
                )
            return found[0]
        case Reducer.FIRST:
            return found[0]
        case Reducer.LAST:
            return found[-1]
        case Reducer.SUM:
            return sum(found) if all(isinstance(value, int) for value in found) else math.fsum(found)
        case Reducer.MAX:
            return max(found)
        case Reducer.MIN:
            return min(found)
        case Reducer.MEAN:
            return math.fsum(found) / len(found)
        case Reducer.TOKEN_MEAN:
            return _weighted_mean(name, found, weights)


def _weighted_mean(name: str, values: list[float | int], weights: Sequence[object] | None) -> float:
    if weights is None or len(weights) != len(values):
        count = "none" if weights is None else len(weights)
        raise ValueError(
            f"metric {name}: needs one token count for each of {len(values)} values, got {count}"
        )
    tokens = [number("tokens/trained", weight) for weight in weights]
    if min(tokens) < 0 or not any(tokens):
        raise ValueError(f"metric {name}: token counts must not be negative or all zero, got {tokens}")
    products = (value * count for value, count in zip(values, tokens, strict=True))
    return math.fsum(products) / math.fsum(tokens)

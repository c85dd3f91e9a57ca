"""What is learned from, and how: groups, rewards, advantages, updates."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Literal

from learner.config import ObjectiveConfig
from rl.config.rules import require
from sampler.config import SamplingConfig


@dataclass(frozen=True)
class ShapingConfig:
    """From raw task outcomes to the rewards that are learned from; see `rl.shaping`."""

    overlong_buffer: int = 0  # last tokens before the limit, over which the penalty on length rises; 0: none
    overlong_factor: float = 1.0  # penalty at the limit
    truncated: Literal["keep", "mask"] = (
        "keep"  # learn from truncated responses, or leave them out of the loss
    )
    truncated_reward: float | None = None  # of a truncated response, whatever it says; None: its own

    def __post_init__(self) -> None:
        require(
            self.truncated_reward is None or -inf < self.truncated_reward < inf,
            "algorithm.shaping.truncated_reward",
            self.truncated_reward,
            "finite",
        )
        for key in ("overlong_buffer", "overlong_factor"):
            require(getattr(self, key) >= 0, f"algorithm.shaping.{key}", getattr(self, key), "0 or more")


@dataclass(frozen=True)
class AdvantageConfig:
    """How advantages come from rewards; see `rl.advantages`. gamma and lam concern gae, which needs a critic."""

    estimator: Literal["grpo", "dr_grpo", "leave_one_out", "gae"] = "grpo"
    whiten: bool = False  # to mean 0 and standard deviation 1 over the response tokens of an iteration
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        for key in ("gamma", "lam"):
            value = getattr(self, key)
            require(0 <= value <= 1, f"algorithm.advantage.{key}", value, "between 0 and 1")


@dataclass(frozen=True)
class GapLimitConfig:
    """Bounds on the gap between the engines; see `rl.gap_limit`. None: no bound.

    p99 (nats) and k3: at most; ess: at least. `action` is taken when a bound was crossed in `times` of the last
    `within` iterations: a warning, or a checkpoint and the end of the run.
    """

    p99: float | None = None
    k3: float | None = None
    ess: float | None = None
    times: int = 3
    within: int = 10
    action: Literal["warn", "halt"] = "warn"

    def __post_init__(self) -> None:
        for key in ("p99", "k3", "ess"):
            value = getattr(self, key)
            require(
                value is None or 0 < value < inf, f"algorithm.gap_limit.{key}", value, "more than 0, finite"
            )
        require(self.ess is None or self.ess <= 1, "algorithm.gap_limit.ess", self.ess, "a share, at most 1")
        require(self.times >= 1, "algorithm.gap_limit.times", self.times, "at least 1")
        require(
            self.within >= self.times,
            "algorithm.gap_limit.within",
            self.within,
            f"at least algorithm.gap_limit.times={self.times}",
        )


@dataclass(frozen=True)
class PartialRolloutsConfig:
    """Whether a response may be written in several parts, by the weights of several iterations; see `rl.partial`.

    token_budget: the most tokens that a response grows by in a round of sampling. None, or as many as
    `algorithm.sampling.max_tokens`: responses are written in one go.
    """

    token_budget: int | None = None

    def __post_init__(self) -> None:
        require(
            self.token_budget is None or self.token_budget >= 1,
            "algorithm.partial_rollouts.token_budget",
            self.token_budget,
            "at least 1",
        )


@dataclass(frozen=True)
class AlgorithmConfig:
    """Groups, dynamic sampling, rewards, advantages, and how a batch is cut into updates.

    The defaults are DAPO's (arXiv 2503.14476) but for the overlong penalty and the sizes; presets stand in
    configs/algorithm.
    """

    prompts_per_iteration: int = 16
    expected_length: int | None = (
        None  # mean tokens of prompt and response, for the preflight; None: the limit
    )
    # Drawn in a round of sampling, or with partial rollouts under way in it; None: prompts_per_iteration.
    prompts_per_round: int | None = None
    group_size: int = 8
    updates_per_iteration: int = 1
    dynamic_sampling: bool = True
    max_rounds: int = 10
    min_groups: int | None = None  # groups that suffice when the rounds are used up; None: all of them
    pipeline: Literal["serial", "one_step_off"] = "serial"  # see `rl.pipeline`
    max_staleness: int = 1  # weight versions that a response may be behind the learner that learns from it
    # Experts in the learner: its routers' own (off), those it chose before the update (r2), the sampler's (r3).
    routing_replay: Literal["off", "r2", "r3"] = "off"
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    gap_limit: GapLimitConfig = field(default_factory=GapLimitConfig)
    partial_rollouts: PartialRolloutsConfig = field(default_factory=PartialRolloutsConfig)

    def __post_init__(self) -> None:
        require(
            self.sampling.temperature > 0,
            "algorithm.sampling.temperature",
            self.sampling.temperature,
            "more than 0: greedy responses to a prompt are all alike",
        )
        relative = self.dynamic_sampling or self.advantage.estimator != "gae"
        require(
            self.group_size >= (2 if relative else 1),
            "algorithm.group_size",
            self.group_size,
            "at least 2: advantages, and dynamic sampling, compare responses" if relative else "at least 1",
        )
        for key in ("prompts_per_iteration", "updates_per_iteration", "max_rounds"):
            require(getattr(self, key) >= 1, f"algorithm.{key}", getattr(self, key), "at least 1")
        for key in ("prompts_per_round", "expected_length"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"algorithm.{key}", value, "at least 1")
        require(
            self.min_groups is None
            or self.updates_per_iteration <= self.min_groups <= self.prompts_per_iteration,
            "algorithm.min_groups",
            self.min_groups,
            "between algorithm.updates_per_iteration and algorithm.prompts_per_iteration",
        )
        require(
            self.max_staleness >= self.oldest,
            "algorithm.max_staleness",
            self.max_staleness,
            f"at least {self.oldest} with algorithm.pipeline={self.pipeline}" + self._why_so_old(),
        )
        require(
            self.prompts_per_iteration % self.updates_per_iteration == 0,
            "algorithm.updates_per_iteration",
            self.updates_per_iteration,
            f"must divide algorithm.prompts_per_iteration={self.prompts_per_iteration}",
        )
        require(
            self.shaping.overlong_buffer <= self.sampling.max_tokens,
            "algorithm.shaping.overlong_buffer",
            self.shaping.overlong_buffer,
            f"at most algorithm.sampling.max_tokens={self.sampling.max_tokens}",
        )
        require(
            (self.advantage.estimator == "gae") == (self.objective.critic is not None),
            "algorithm.advantage.estimator",
            self.advantage.estimator,
            "gae and algorithm.objective.critic need each other",
        )

    @property
    def round_size(self) -> int:
        """Groups that a round of sampling works on."""
        return self.prompts_per_round or self.prompts_per_iteration

    @property
    def token_budget(self) -> int:
        """Most tokens that a response grows by in a round of sampling."""
        budget = self.partial_rollouts.token_budget
        return self.sampling.max_tokens if budget is None else min(budget, self.sampling.max_tokens)

    @property
    def parts(self) -> int:
        """Rounds of sampling in which the longest response is written."""
        return ceil(self.sampling.max_tokens / self.token_budget)

    @property
    def behind(self) -> int:
        """Weight versions that the samplers are behind the learner that learns from what they write."""
        return 1 if self.pipeline == "one_step_off" else 0

    @property
    def oldest(self) -> int:
        """Weight versions that a token may be behind the learner at most: every iteration has a round, so that the last
        part of a response is written at most `parts` - 1 iterations after the first; at most `round_size` complete
        groups then wait for a batch; and a pipeline that is one step off adds one.
        """
        if self.parts == 1:
            return self.behind
        return self.behind + self.parts - 1 + ceil(self.round_size / self.prompts_per_iteration)

    def _why_so_old(self) -> str:
        if self.parts == 1:
            return ""
        return (
            f" and algorithm.partial_rollouts.token_budget={self.token_budget}: a response of"
            f" algorithm.sampling.max_tokens={self.sampling.max_tokens} is written in up to {self.parts} iterations,"
            f" and its group may wait for a batch in {ceil(self.round_size / self.prompts_per_iteration)} more"
        )

    @property
    def rollout_sampling(self) -> SamplingConfig:
        """`sampling`, with the sampler's routes where they are replayed."""
        if self.routing_replay != "r3" or self.sampling.return_routes:
            return self.sampling
        return replace(self.sampling, return_routes=True)

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probabilities of the reference policy are needed."""
        return self.objective.kl.coefficient > 0

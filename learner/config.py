"""Settings of the learner. The defaults here are the only ones."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kernels.checks import checker

DTYPES = ("float32", "bfloat16")
LOSS_AGGREGATIONS = ("token_mean",)


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How the policy is held, optimised and cut into micro-batches.

    Raises ValueError naming field, value and rule.
    """

    dtype: str = "float32"  # of parameters and activations; with bfloat16 the optimiser keeps FP32 masters
    device: str = "cpu"  # cpu, cuda or cuda:N
    threads: int = 0  # intra-operation threads of torch; 0 leaves torch's own choice
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0  # decoupled, never on norms
    grad_clip: float = 1.0  # largest global L2 norm of the gradient; 0 means no clipping
    warmup_steps: int = 0  # steps over which the learning rate rises linearly to `lr`
    micro_batch_tokens: int = 8192  # padded tokens in one micro-batch
    logits_bytes: int = 256 * 1024 * 1024  # bound on one chunk of FP32 logits
    tensor_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        check = checker(self)
        check("dtype", lambda v: v in DTYPES, f"must be one of {', '.join(DTYPES)}")
        check("device", lambda v: re.fullmatch(r"cpu|cuda(:\d+)?", v), "must be cpu, cuda or cuda:N")
        check("threads", lambda v: v >= 0, "must not be negative")
        check("lr", lambda v: 0 < v < math.inf, "must be positive and finite")
        check("betas", lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "must be two numbers in [0, 1)")
        check("eps", lambda v: 0 < v < math.inf, "must be positive and finite")
        check("weight_decay", lambda v: 0 <= v < math.inf, "must not be negative and must be finite")
        check("grad_clip", lambda v: 0 <= v < math.inf, "must not be negative and must be finite")
        check("warmup_steps", lambda v: v >= 0, "must not be negative")
        check("micro_batch_tokens", lambda v: v >= 1, "must be at least 1")
        check("logits_bytes", lambda v: v >= 1, "must be at least 1")
        for name in ("tensor_parallel", "expert_parallel", "pipeline_parallel"):
            check(name, lambda v: v == 1, "must be 1: the learner runs in one process")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The clipped policy objective; see `learner.objective`.

    Raises ValueError naming field, value and rule.
    """

    clip_low: float = 0.2  # the probability ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28
    tis_cap: float | None = 2.0  # largest truncated-importance-sampling weight; None means weight 1
    loss_aggregation: str = "token_mean"

    def __post_init__(self) -> None:
        check = checker(self)
        check("clip_low", lambda v: 0 < v < 1, "must lie in (0, 1)")
        check("clip_high", lambda v: 0 < v < math.inf, "must be positive and finite")
        check("tis_cap", lambda v: v is None or 0 < v < math.inf, "must be None (off) or positive and finite")
        check(
            "loss_aggregation",
            lambda v: v in LOSS_AGGREGATIONS,
            f"must be one of {', '.join(LOSS_AGGREGATIONS)}",
        )

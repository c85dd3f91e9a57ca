"""Settings of the learner. The defaults here are the only ones."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from kernels.checks import checker

DTYPES = ("float32", "bfloat16")
LOSS_AGGREGATIONS = ("token_mean", "sequence_mean", "dr_grpo")
CORRECTION_WEIGHTS = ("off", "token", "sequence")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_PLACES = ("loss", "reward")


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
    micro_batch_tokens: int = 8192  # in one micro-batch, at most
    logits_bytes: int = 256 * 1024 * 1024  # bound on one chunk of FP32 logits
    offload: bool = False  # while samplers are at work, weights and optimiser wait in the host's memory
    data_parallel: int = 1  # replicas that share out each mini-batch; see `learner.layout` for these four
    tensor_parallel: int = 1  # processes among which attention and embeddings of a layer are cut
    expert_parallel: int = (
        1  # processes, of tensor_parallel x data_parallel, that share out a layer's experts
    )
    pipeline_parallel: int = 1  # stages into which the layers are cut
    context_parallel: int = 1
    transformer_engine: bool = True  # use it on a GPU where it is installed, outside the experts
    recompute: bool = False  # keep only layers' inputs for the gradient, and compute activations again

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
        for name in ("data_parallel", "tensor_parallel", "expert_parallel", "pipeline_parallel"):
            check(name, lambda v: v >= 1, "must be at least 1")
        check(
            "context_parallel",
            lambda v: v == 1,
            "must be 1: a sequence is not cut; tensor_parallel cuts tokens",
        )

    @property
    def processes(self) -> int:
        """How many share the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """How a token is weighed, or rejected, that sampler and learner hold for differently likely; see
    `learner.correction`. The parts work together: what is rejected by any of them has weight 0.

    Raises ValueError naming field, value and rule.
    """

    weight: str = "token"  # importance weight of each token, of its whole sequence, or off: weight 1
    cap: float | None = 2.0  # largest weight; None: no truncation
    token_band: tuple[float, float] | None = None  # rejects a token whose ratio lies outside
    sequence_band: tuple[float, float] | None = None  # rejects a sequence whose mean ratio lies outside
    veto: float | None = None  # rejects a sequence with any ratio below

    def __post_init__(self) -> None:
        check = checker(self)
        check("weight", lambda v: v in CORRECTION_WEIGHTS, f"must be one of {', '.join(CORRECTION_WEIGHTS)}")
        check("cap", lambda v: v is None or 0 < v < math.inf, "must be None or positive and finite")
        for band in ("token_band", "sequence_band"):
            check(
                band, lambda v: v is None or _is_band(v), "must be None or two numbers, 0 <= low <= 1 <= high"
            )
        check("veto", lambda v: v is None or 0 < v < 1, "must be None or lie in (0, 1)")


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Penalty on the divergence from a reference policy, the policy that the run started from.

    Raises ValueError naming field, value and rule.
    """

    coefficient: float = 0.0  # 0: no penalty and no reference policy
    estimator: str = "k3"  # see `learner.kl`
    place: str = "loss"  # in the loss of each token, or in the reward

    def __post_init__(self) -> None:
        check = checker(self)
        check("coefficient", lambda v: 0 <= v < math.inf, "must not be negative and must be finite")
        check("estimator", lambda v: v in KL_ESTIMATORS, f"must be one of {', '.join(KL_ESTIMATORS)}")
        check("place", lambda v: v in KL_PLACES, f"must be one of {', '.join(KL_PLACES)}")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value function that generalised advantage estimation needs; see `learner.critic`, `learner.value_loss`.

    Whatever is not set here (optimiser, micro-batches, ...) is as LearnerConfig has it for the policy.

    Raises ValueError naming field, value and rule.
    """

    value_clip: float | None = 0.2  # a value moves no further from its old one in one update; None: no bound
    lr_factor: float = 10.0  # the learning rate, as a multiple of the policy's
    warmup_iterations: int = 0  # first iterations of a run, in which the critic alone learns

    def __post_init__(self) -> None:
        check = checker(self)
        check("value_clip", lambda v: v is None or 0 < v < math.inf, "must be None or positive and finite")
        check("lr_factor", lambda v: 0 < v < math.inf, "must be positive and finite")
        check("warmup_iterations", lambda v: v >= 0, "must not be negative")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The clipped policy objective; see `learner.objective`.

    Raises ValueError naming field, value and rule.
    """

    clip_low: float = 0.2  # the probability ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28
    dual_clip: float | None = None  # largest ratio that counts where the advantage is negative; None: any
    loss_aggregation: str = "token_mean"  # see `learner.aggregation`
    max_response_tokens: int | None = None  # the constant length of dr_grpo, which alone needs it
    entropy_coefficient: float = 0.0  # entropy is rewarded in the loss; 0: only measured
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    critic: CriticConfig | None = None

    def __post_init__(self) -> None:
        check = checker(self)
        check("clip_low", lambda v: 0 < v < 1, "must lie in (0, 1)")
        check("clip_high", lambda v: 0 < v < math.inf, "must be positive and finite")
        check(
            "dual_clip",
            lambda v: v is None or 1 + self.clip_high < v < math.inf,
            f"must be None (off) or finite and more than 1 + clip_high = {1 + self.clip_high}",
        )
        check(
            "loss_aggregation",
            lambda v: v in LOSS_AGGREGATIONS,
            f"must be one of {', '.join(LOSS_AGGREGATIONS)}",
        )
        check(
            "max_response_tokens",
            lambda v: v >= 1 if self.loss_aggregation == "dr_grpo" else v is None or v >= 1,
            f"must be at least 1 with loss_aggregation={self.loss_aggregation}",
        )
        check("entropy_coefficient", lambda v: 0 <= v < math.inf, "must not be negative and must be finite")


def _is_band(band: tuple[float, float]) -> bool:
    return len(band) == 2 and 0 <= band[0] <= 1 <= band[1] < math.inf

"""Settings of the sampler. The defaults here are the only ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernels.checks import checker

DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
SLEEPS = ("off", "keep", "discard")
EXPERT_LAYOUTS = ("auto", "rows", "tiles")


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How the engine holds the model and schedules requests.

    Raises ValueError naming field, value and rule.
    """

    device: str = (
        "cpu"  # cpu or cuda, for which the installed vLLM must be built; a process takes the GPU of its rank
    )
    dtype: str = "float32"  # of weights and activations outside the experts
    # Processes of one engine, each with a GPU of its own (or on the CPU): they share out attention heads, vocabulary
    # and whole experts.
    tensor_parallel: int = 1
    max_model_len: int = 1024  # tokens of prompt and response together
    max_num_seqs: int = 128  # sequences that are decoded together
    max_num_batched_tokens: int = 4096  # tokens of one forward pass
    chunked_prefill: bool = False  # prompts may be cut over several passes; needs a strict spec
    kv_cache_gib: float = 1.0
    prefix_caching: bool = True  # within one call; nothing cached outlives it
    # While the learner works: stay awake (off), or free the cache and the weights, which wait in the host's memory
    # (keep) or are sent anew (discard).
    sleep: str = "off"
    # Order of 4-bit weights: rows, tiles (`kernels.experts.StoredLayout`), or the one that the back end reads (auto).
    expert_layout: str = "auto"
    stock: bool = False  # vLLM as it is, with its own expert layers; see `sampler.stock`
    # Numbers of sequences for which decoding steps are captured as CUDA graphs. Steps of up to the largest are
    # replayed; others are launched kernel by kernel. Needs cuda.
    cuda_graph_sizes: tuple[int, ...] = ()
    threads: int = 0  # intra-operation threads of torch; 0 leaves torch's own choice
    seed: int = 0  # of the engine's global generators; every response has a seed of its own

    def __post_init__(self) -> None:
        check = checker(self)
        check("device", lambda v: v in DEVICES, f"must be one of {', '.join(DEVICES)}")
        check("dtype", lambda v: v in DTYPES, f"must be one of {', '.join(DTYPES)}")
        check("tensor_parallel", lambda v: v >= 1, "must be at least 1")
        check("max_model_len", lambda v: v >= 2, "must be at least 2: one token of prompt, one of response")
        check("max_num_seqs", lambda v: v >= 1, "must be at least 1")
        check(
            "max_num_batched_tokens",
            lambda v: v >= max(self.max_num_seqs, 0 if self.chunked_prefill else self.max_model_len),
            f"must be at least max_num_seqs={self.max_num_seqs} and, unless prompts may be cut,"
            f" max_model_len={self.max_model_len}",
        )
        check("kv_cache_gib", lambda v: 0 < v < math.inf, "must be positive and finite")
        check("sleep", lambda v: v in SLEEPS, f"must be one of {', '.join(SLEEPS)}")
        check("expert_layout", lambda v: v in EXPERT_LAYOUTS, f"must be one of {', '.join(EXPERT_LAYOUTS)}")
        sizes = (
            "must be numbers of sequences from 1 to max_num_seqs, in ascending order, and need device=cuda"
        )
        check(
            "cuda_graph_sizes",
            lambda v: (
                list(v) == sorted({n for n in v if 1 <= n <= self.max_num_seqs})
                and (not v or self.device == "cuda")
            ),
            sizes,
        )
        check("threads", lambda v: v >= 0, "must not be negative")
        check("seed", lambda v: 0 <= v < 2**32, "must lie in [0, 2**32)")

    @property
    def processes(self) -> int:
        """Of one engine."""
        return self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a response is drawn.

    Raises ValueError naming field, value and rule. The lower bound on the temperature is vLLM's: it would
    replace a smaller one without a word.
    """

    temperature: float = 1.0  # 0 takes the likeliest token
    top_p: float = 1.0
    max_tokens: int = 256  # of the response
    stop_token_ids: tuple[int, ...] = ()  # a response ends with the first of these, which it includes
    return_routes: bool = False  # with each response come the experts of its tokens and of its prompt's

    def __post_init__(self) -> None:
        check = checker(self)
        check("temperature", lambda v: v == 0 or 0.01 <= v <= 2, "must be 0 or lie in [0.01, 2]")
        check("top_p", lambda v: 0 < v <= 1, "must lie in (0, 1]")
        check("max_tokens", lambda v: v >= 1, "must be at least 1")
        check("stop_token_ids", lambda v: all(i >= 0 for i in v), "must not be negative")

"""Draws for all requests of a batch at once, each a function of its request's seed and its token's position alone.

vLLM makes the random numbers of a request with a seed by a generator of its own, a call for each request in each step.
Here they are a hash of seed, position and token: a few operations on the whole batch, wherever in it a request stands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

SEED = "minite_seed"  # of a response, in `SamplingParams.extra_args`


class BatchedDraws(nn.Module):
    """In the place of a vLLM sampler's `topk_topp_sampler`, for `processed_logprobs`."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [N, V] -> tokens int64 [N], and log-probabilities [N, V] of the distribution they are drawn from."""
        logp = apply_top_k_top_p(logits, k, p).log_softmax(-1, dtype=torch.float32)
        seeds, positions = seeds_and_positions(self._runner, len(logits))
        noise = exponential_noise(seeds, positions, logits.shape[1], logits.device)
        # Of exponential variables x_i, the least x_i / p_i has index i with probability p_i.
        return logp.exp().div_(noise).argmax(-1), logp


def seeds_and_positions(runner: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """uint64 of the first `count` requests in a vLLM model runner's batch; position: of the token to be drawn."""
    batch, starts = runner.input_batch, runner.query_start_loc.np[: count + 1]
    positions = batch.num_computed_tokens_cpu[:count] + (starts[1:] - starts[:-1])
    parameters = (runner.requests[request].sampling_params for request in batch.req_ids[:count])
    seeds = [(own.extra_args or {}).get(SEED, 0) for own in parameters]
    return np.array(seeds, dtype=np.uint64), positions.astype(np.uint64)


def exponential_noise(
    seeds: np.ndarray, positions: np.ndarray, width: int, device: torch.device
) -> torch.Tensor:
    """uint64 [N] and [N] -> float32 [N, width], exponential variables of rate 1, never 0.

    A counter-based generator: the column's number is mixed with the row's key by 32-bit finalisers (C. Wellons,
    "Prospecting for Hash Functions", 2018), the key made from seed and position by splitmix64's (Steele, Lea and Flood,
    OOPSLA 2014). Uniform numbers have 31 bits, so that the least are as exact as FP32 has them.
    """
    keys = _mix64(_mix64(seeds) + positions)
    low, high = (
        torch.from_numpy(own.astype(np.uint32).view(np.int32)).to(device)[:, None]
        for own in (keys, keys >> np.uint64(32))
    )
    column = torch.arange(width, dtype=torch.int32, device=device) * -0x61C88647  # 2^32 over the golden ratio
    mixed = _mix32_(_mix32_(column ^ low).add_(high))
    uniform = mixed.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2**-31)
    return uniform.neg_().log1p_().neg_()


def _mix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """int32, in place; products wrap."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x.bitwise_xor_(_right(x, shift)).mul_(factor)
    return x.bitwise_xor_(_right(x, 16))


def _right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted without its sign."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)

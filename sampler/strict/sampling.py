"""Strict log-probabilities of sampled tokens, and draws that depend on nothing but distribution, seed and position."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from kernels.strict.elementary import exp
from kernels.strict.output import OutputLayer

SEED = "minite_seed"  # of a response, in `SamplingParams.extra_args`
_GREEDY = 1e-5  # vLLM takes the likeliest token at a lower temperature


class StrictSampler(Sampler):
    """In the place of a model runner's sampler.

    vLLM's generators follow the order of draws, cannot be set back where a prompt is computed in parts, and have no
    state that a CPU could give. Here each draw begins a generator of its own, from the seed of the response and the
    position of the token.
    """

    def __init__(self, runner: Any, output: OutputLayer) -> None:
        super().__init__(logprobs_mode="processed_logprobs")
        self._runner, self._output = runner, output

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Of temperature 1."""
        return self._output.log_softmax(logits.float(), torch.ones_like(logits[:, 0], dtype=torch.float32))

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [N, V] -> tokens int64 [N] and log-probabilities float32 [N, V] of the distribution drawn from."""
        own = sampling_metadata.temperature
        if own is None:  # all greedy
            return logits.argmax(-1), self.compute_logprobs(logits)
        greedy = own < _GREEDY
        if sampling_metadata.top_p is not None:
            # Whether a token at its edge is in the nucleus may depend on the batch; the strict gap is for top_p = 1.
            scaled = logits / own.masked_fill(greedy, 1.0)[:, None]
            logits = logits.masked_fill(
                apply_top_k_top_p(scaled, None, sampling_metadata.top_p).isinf(), -torch.inf
            )
        logp = self._output.log_softmax(logits, own.masked_fill(greedy, 1.0))
        return torch.where(greedy, logits.argmax(-1), self._draw(logp)), logp

    def _draw(self, logp: torch.Tensor) -> torch.Tensor:
        """One token of each row: of exponential variables x_i, the least x_i / p_i has index i with probability p_i."""
        noise = torch.empty_like(logp)
        for row, seed in zip(noise, self._seeds(len(noise)), strict=True):
            row.exponential_(generator=torch.Generator(logp.device).manual_seed(seed))
        return (exp(logp) / noise).argmax(-1)

    def _seeds(self, count: int) -> list[int]:
        runner = self._runner
        batch, starts = runner.input_batch, runner.query_start_loc.np
        seeds = []
        for index, request in enumerate(batch.req_ids[:count]):
            position = int(batch.num_computed_tokens_cpu[index]) + int(starts[index + 1] - starts[index])
            seed = (runner.requests[request].sampling_params.extra_args or {}).get(SEED, 0)
            digest = hashlib.sha256(f"{seed}/{position}".encode()).digest()
            seeds.append(int.from_bytes(digest[:8], "little") >> 1)
        return seeds

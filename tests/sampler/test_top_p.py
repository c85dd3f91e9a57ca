"""Sampler and learner cut the same distribution in the same way."""

from __future__ import annotations

import pytest
import torch

from learner.logprobs import nucleus, score_logits


@pytest.mark.parametrize("vocabulary", [50, 5000])
@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.7, 0.95, 0.999])
def test_the_learners_nucleus_is_vllms_bit_for_bit(top_p: float, vocabulary: int) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(100, vocabulary, generator=generator)
    logits[:50] = logits[:50].round()  # many ties
    sampler = apply_top_k_top_p_pytorch(logits.clone(), None, torch.full((100,), top_p), allow_cpu_sync=True)
    kept = nucleus(logits, top_p)
    assert torch.equal(kept, sampler > -torch.inf)
    likeliest = logits.argmax(-1)
    found = score_logits(logits, likeliest, top_p)
    expected = sampler.log_softmax(-1, dtype=torch.float32).gather(1, likeliest[:, None])[:, 0]
    assert torch.equal(found.logp[~found.outside_nucleus], expected[~found.outside_nucleus])

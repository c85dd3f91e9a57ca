from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from kernels.routing import NO_ROUTE
from learner.policy import Policy
from learner.router import Router, at_experts
from tests.learner.conftest import MakeFolder, config, precision_map

RENORMALISED = pytest.mark.parametrize("renormalised", [True, False])


@pytest.fixture(scope="module")
def router(model_folder: MakeFolder) -> Router:
    policy = Policy(model_folder("qwen3_moe"), precision_map("bf16"), config(), seed=0)
    return policy.model.decoder.layers[0].mlp.router


def coarse_logits(router: Router, seed: int) -> torch.Tensor:
    """[10, E] of few values, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (10, router.config.num_moe_experts), generator=generator) / 2


@RENORMALISED
@given(seed=st.integers(0, 2**31))
def test_slots_descend_and_ties_go_to_the_lower_expert(router: Router, renormalised: bool, seed: int) -> None:
    router.config.moe_router_pre_softmax = not renormalised
    logits = coarse_logits(router, seed)
    coefficients, ids = router.routing(logits)
    for row in range(len(logits)):
        own = list(zip(coefficients[row].tolist(), ids[row].tolist(), strict=True))
        assert own == sorted(own, key=lambda slot: (-slot[0], slot[1]))
        assert sorted(logits[row, ids[row]].tolist()) == logits[row].sort().values[-router.topk :].tolist()


@RENORMALISED
def test_choice_coefficients_and_gradient_are_those_of_megatron(router: Router, renormalised: bool) -> None:
    router.config.moe_router_pre_softmax = not renormalised
    logits = torch.randn(50, router.config.num_moe_experts, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    own, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    coefficients, ids = router.routing(own)
    dense, chosen = topk_routing_with_score_function(theirs, router.topk, use_pre_softmax=not renormalised)
    assert torch.equal(torch.zeros_like(chosen).scatter(1, ids, True), chosen)
    torch.testing.assert_close(coefficients, dense.gather(1, ids), rtol=1e-6, atol=0)
    (coefficients * weights.gather(1, ids)).sum().backward()
    (dense * weights).sum().backward()
    torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@RENORMALISED
def test_gradients_of_replayed_coefficients_against_finite_differences(
    router: Router, renormalised: bool
) -> None:
    router.config.moe_router_pre_softmax = not renormalised
    routes = torch.tensor([[3, 1], [0, 2], [NO_ROUTE, NO_ROUTE]])
    logits = torch.randn(
        3, router.config.num_moe_experts, generator=torch.Generator().manual_seed(0)
    ).double()
    with router.router_replay.following(routes):
        found, ids = router.routing(logits)
        assert ids[:2].sort().values.tolist() == [[1, 3], [0, 2]]
        exact = logits.softmax(-1).gather(1, ids)
        exact = exact / exact.sum(-1, keepdim=True) if renormalised else exact
        torch.testing.assert_close(found, exact)
        assert torch.autograd.gradcheck(lambda x: router.routing(x)[0], logits.requires_grad_())


def test_gradients_reach_the_chosen_scores_only() -> None:
    scores = torch.tensor([[0.2, 0.5, 0.3]], requires_grad=True)
    (at_experts(scores, torch.tensor([[1, 0]])) * torch.tensor([[10.0, 1.0]])).sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[1.0, 10.0, 0.0]]

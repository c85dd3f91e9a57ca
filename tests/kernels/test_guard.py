"""Values that are not finite: recorded by expert, refused at the check."""

from __future__ import annotations

import pytest
import torch

from kernels.autograd import expert_layer
from kernels.catalogue import CATALOGUE, named_spec
from kernels.experts import ExpertWeights
from kernels.guard import NonFiniteGuard, Operand, check_guards
from kernels.reference import PreparedExperts, forward, prepare
from kernels.spec import ExecutionSpec

T, H, F, E = 12, 64, 32, 4
REFUSING = [
    name for name in CATALOGUE if (q := named_spec(name).activation) is not None and q.non_finite == "refuse"
]
G = torch.Generator().manual_seed(0)
X = torch.randn(T, H, generator=G)
IDS = torch.stack((torch.arange(T) % 3, torch.full((T,), 3)), dim=1)  # expert 3 has every token
P = torch.rand(T, 2, generator=G).softmax(1)
W13, W2 = torch.randn(E, 2 * F, H, generator=G) / H**0.5, torch.randn(E, H, F, generator=G) / F**0.5


def prepared(spec: ExecutionSpec) -> PreparedExperts:
    return prepare(ExpertWeights.quantize(W13, W2, spec), spec)


def test_counts_are_named_by_operand_and_expert_and_then_forgotten() -> None:
    guard = NonFiniteGuard(7, 3)
    guard.check()
    bad = torch.tensor([True, False, True, True])
    guard.record(Operand.FC1_INPUT, bad, torch.tensor([0, 1, 2, 2]))
    guard.record(Operand.FC1_INPUT, bad, torch.tensor([2, 2, 1, 2]))
    guard.record(Operand.GRADIENT, bad, 1)
    message = (
        r"layer 7: FC1 input of expert 0 \(1 rows\), 1 \(1 rows\), 2 \(4 rows\);"
        r" operands of the gradient of expert 1 \(3 rows\)"
    )
    with pytest.raises(ValueError, match=message):
        guard.check()
    guard.check()
    guard.record(Operand.FC2_INPUT, bad, 0)
    guard.clear()
    guard.check()


def test_experts_are_named_as_all_ranks_count_them() -> None:
    guard = NonFiniteGuard(0, 2, first_expert=4)
    guard.record(Operand.FC1_INPUT, torch.tensor([True]), 1)
    with pytest.raises(ValueError, match=r"FC1 input of expert 5 \(1 rows\)$"):
        guard.check()


def test_all_layers_are_checked_and_named_at_once() -> None:
    guards = [NonFiniteGuard(layer, experts) for layer, experts in ((0, 2), (1, 5), (2, 3), (3, 1))]
    for guard in guards[1:]:
        guard.record(Operand.FC2_INPUT, torch.tensor([False]), 0)
    check_guards(guards)
    guards[1].record(Operand.FC2_INPUT, torch.tensor([True]), 4)
    guards[2].record(Operand.FC1_INPUT, torch.tensor([True]), 2)
    with pytest.raises(
        ValueError, match=r"layer 1: FC2 input of expert 4 \(1 rows\) \| layer 2: FC1 .* 2 \(1 rows\)$"
    ):
        check_guards(guards)
    check_guards(guards)


@pytest.mark.parametrize("name", [*REFUSING, "minite[tensor]"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_token_counts_for_every_expert_it_goes_to(name: str, value: float) -> None:
    spec = (
        named_spec(name)
        if name in CATALOGUE
        else named_spec("minite", {"activation": {"outer_domain": "tensor"}})
    )
    x, guard = X.clone(), NonFiniteGuard(2, E)
    forward(x, IDS, P, prepared(spec), spec, guard)
    guard.check()
    x[4, 5] = value
    x[7, 0] = value
    forward(x, IDS, P, prepared(spec), spec, guard)
    with pytest.raises(ValueError, match=r"layer 2: FC1 input of expert 1 \(2 rows\), 3 \(2 rows\)"):
        guard.check()
    with pytest.raises(ValueError, match="cannot quantise FC1 input"):  # without a guard: at once
        forward(x, IDS, P, prepared(spec), spec)


def test_an_overflow_inside_the_layer_is_seen_at_fc2() -> None:
    spec, guard = named_spec("minite"), NonFiniteGuard(0, E)
    x, w13 = X.clone(), W13.clone()
    x[3] *= 1e10  # gate and up near 1e20: their product is an infinity there, and only there
    w13[0] *= 1e10
    weights = prepare(ExpertWeights.quantize(w13, W2, spec), spec)
    forward(x, IDS, P, weights, spec, guard)
    with pytest.raises(ValueError, match=r"layer 0: FC2 input of expert 0 \(1 rows\)$"):
        guard.check()
    with pytest.raises(ValueError, match="cannot quantise FC2 input"):
        forward(x, IDS, P, weights, spec)


@pytest.mark.parametrize("name", ["bf16", "te_exact", "vllm_cuda"])
def test_specs_that_do_not_refuse_record_nothing(name: str) -> None:
    spec, guard, x = named_spec(name), NonFiniteGuard(0, E), X.clone()
    x[0] = float("nan")
    output = forward(x, IDS, P, prepared(spec), spec, guard)
    guard.check()
    assert output[0].isnan().any() == (name == "bf16")


def test_gradients_that_cannot_be_quantised_are_recorded_by_expert() -> None:
    spec, guard = named_spec("minite_mxfp8_backward"), NonFiniteGuard(5, E)
    x = X.clone().requires_grad_()
    output = expert_layer(x, IDS, P, W13, W2, prepared(spec), spec, guard=guard)
    d_output = torch.ones_like(output)
    d_output[1] = float("nan")  # goes to experts 1 and 3
    output.backward(d_output, retain_graph=True)
    with pytest.raises(
        ValueError, match=r"layer 5: operands of the gradient of expert 1 \(\d+ rows\), 3 \(\d+ rows\)$"
    ):
        guard.check()
    output.backward(torch.ones_like(output))
    guard.check()
    output = expert_layer(x, IDS, P, W13, W2, prepared(spec), spec)
    with pytest.raises(ValueError, match="cannot quantise gradient in dgrad of FC2"):
        output.backward(d_output)


def test_a_guard_that_first_recorded_in_inference_mode_can_be_cleared() -> None:
    spec, guard, x = named_spec("minite"), NonFiniteGuard(0, E), X.clone()
    x[0, 0] = float("nan")
    with torch.inference_mode():
        forward(x, IDS, P, prepared(spec), spec, guard)
    with pytest.raises(ValueError, match="layer 0: FC1 input of expert 0"):
        guard.check()
    forward(X, IDS, P, prepared(spec), spec, guard)
    guard.check()


def test_recording_does_not_change_the_output() -> None:
    spec = named_spec("minite")
    guarded = forward(X, IDS, P, prepared(spec), spec, NonFiniteGuard(0, E))
    assert torch.equal(guarded, forward(X, IDS, P, prepared(spec), spec))

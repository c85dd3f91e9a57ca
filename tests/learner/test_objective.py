from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from learner.batch import Totals, TrainBatch
from learner.config import CorrectionConfig, KLConfig, ObjectiveConfig
from learner.objective import negative_log_likelihood, policy_loss
from tests.learner.batches import make_batch, random_batch, random_logp

EVERYTHING = {
    "dual_clip": 1.5,
    "entropy_coefficient": 0.3,
    "kl": KLConfig(coefficient=0.7, estimator="k3"),
    "correction": CorrectionConfig(
        weight="sequence", cap=1.5, token_band=(0.4, 3.0), sequence_band=(0.8, 1.3), veto=0.2
    ),
}
# Every term of the loss, every value of every choice, and all together.
CONFIGS = {
    "default": {},
    "dual_clip": {"dual_clip": 1.5},
    "entropy": {"entropy_coefficient": 0.3},
    **{
        f"kl_{estimator}": {"kl": KLConfig(coefficient=0.7, estimator=estimator)}
        for estimator in ("k1", "k2", "k3")
    },
    "kl_in_reward": {"kl": KLConfig(coefficient=0.7, place="reward")},
    "correction_off": {"correction": CorrectionConfig(weight="off")},
    "sequence_tis": {"correction": CorrectionConfig(weight="sequence", cap=1.5)},
    "icepop": {"correction": CorrectionConfig(cap=None, token_band=(0.5, 2.0))},
    "geometric": {"correction": CorrectionConfig(weight="off", sequence_band=(0.8, 1.3))},
    "veto": {"correction": CorrectionConfig(veto=0.3)},
    "sequence_mean": {"loss_aggregation": "sequence_mean"},
    "dr_grpo": {"loss_aggregation": "dr_grpo", "max_response_tokens": 20},
    "everything": EVERYTHING,
    "everything_sequence_mean": EVERYTHING | {"loss_aggregation": "sequence_mean"},
    "everything_dr_grpo": EVERYTHING | {"loss_aggregation": "dr_grpo", "max_response_tokens": 20},
}
DEFAULT = ObjectiveConfig()
each_config = pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())


def loss_of(
    new: float, old: float, sampler: float, advantage: float, config: ObjectiveConfig = DEFAULT
) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient with respect to `new`, and sums, of a single token."""
    variable = torch.tensor([[0.0, new]], requires_grad=True)
    batch = make_batch(
        torch.tensor([[True]]), torch.tensor([[old]]), torch.tensor([[sampler]]), torch.tensor([advantage])
    )
    loss, sums = policy_loss(batch, variable, torch.zeros(1, 2), batch.totals, config)
    loss.backward()
    return loss.item(), variable.grad[0, 1].item(), {name: float(value) for name, value in sums.items()}


def run(
    batch: TrainBatch, new: torch.Tensor, entropy: torch.Tensor, totals: Totals, config: ObjectiveConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, gradients with respect to both variables (zeros where there is none), and sums."""
    new, entropy = (x.detach().clone().requires_grad_() for x in (new, entropy))
    loss, sums = policy_loss(batch, new, entropy, totals, config)
    gradients = torch.autograd.grad(loss, (new, entropy), allow_unused=True, materialize_grads=True)
    return loss.detach(), *gradients, sums


def by_hand(batch: TrainBatch, new: torch.Tensor, entropy: torch.Tensor, config: ObjectiveConfig) -> float:
    """The loss from its definition, token by token, in Python floats."""
    logs = {
        name: getattr(batch, name).double().tolist()
        for name in ("old_logp", "sampler_logp", "reference_logp")
    }
    advantages = batch.advantages.double().tolist()
    total = 0.0
    rows = [row.nonzero().flatten().tolist() for row in batch.loss_mask]
    for i, tokens in enumerate(rows):
        d = {t: logs["old_logp"][i][t] - logs["sampler_logp"][i][t] for t in tokens}
        if not tokens:
            continue
        correction = config.correction
        mean, product = math.exp(sum(d.values()) / len(d)), math.exp(sum(d.values()))
        low, high = correction.sequence_band or (0, math.inf)
        dropped = not low <= mean <= high or math.exp(min(d.values())) < (correction.veto or 0)
        share = {
            "token_mean": sum(map(len, rows)),
            "sequence_mean": len(tokens) * sum(map(bool, rows)),
            "dr_grpo": len(rows) * (config.max_response_tokens or 0),
        }[config.loss_aggregation]
        for t in tokens:
            n, o, ref = new[i, t].item(), logs["old_logp"][i][t], logs["reference_logp"][i][t]
            a = advantages[i][t] if isinstance(advantages[i], list) else advantages[i]
            low, high = correction.token_band or (0, math.inf)
            kept = not dropped and low <= math.exp(d[t]) <= high
            w = {"token": math.exp(d[t]), "sequence": product, "off": 1.0}[correction.weight]
            w = min(w, correction.cap or math.inf) * kept
            r = math.exp(n - o)
            s = min(r * a, min(max(r, 1 - config.clip_low), 1 + config.clip_high) * a)
            if config.dual_clip and a < 0:
                s = max(s, config.dual_clip * a)
            kl = {"k1": n - ref, "k2": (n - ref) ** 2 / 2, "k3": math.exp(ref - n) - 1 + n - ref}
            penalty = config.kl.coefficient * kl[config.kl.estimator] * (config.kl.place == "loss")
            total += (-w * s + penalty - config.entropy_coefficient * entropy[i, t].item()) / share
    return total


@each_config
@pytest.mark.parametrize("per_token", [False, True], ids=["sequence_advantages", "token_advantages"])
def test_agrees_with_the_definition_token_by_token(changes: dict[str, Any], per_token: bool) -> None:
    config = ObjectiveConfig(**changes)
    for seed in range(3):
        batch = random_batch(seed=seed, per_token=per_token)
        new, entropy = random_logp(batch)
        loss, _ = policy_loss(batch, new, entropy, batch.totals, config)
        assert loss.item() == pytest.approx(by_hand(batch, new, entropy, config), rel=1e-5)


@each_config
def test_gradients_agree_with_finite_differences(changes: dict[str, Any]) -> None:
    config = ObjectiveConfig(**changes)
    batch = random_batch(rows=5, width=6)
    new, entropy = random_logp(batch)
    assert torch.autograd.gradcheck(
        lambda n, e: policy_loss(batch, n, e, batch.totals, config)[0], (new, entropy), eps=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"entropy_coefficient": 0.3}, 1),
        *(({"kl": KLConfig(coefficient=0.7, estimator=e)}, 0) for e in ("k1", "k2", "k3")),
    ],
)
def test_no_term_of_the_loss_is_without_gradient(changes: dict[str, Any], where: int) -> None:
    """With advantages of zero only that term is left, at every token of the mask and nowhere else."""
    batch = random_batch()
    batch = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    gradient = run(batch, *random_logp(batch), batch.totals, ObjectiveConfig(**changes))[1:3][where]
    assert torch.equal(gradient != 0, batch.loss_mask)


@each_config
def test_splits_order_and_padding_change_nothing(changes: dict[str, Any]) -> None:
    """Random orders, cut at random places, each part padded further with NaN."""
    config = ObjectiveConfig(**changes)
    batch = random_batch(rows=8)
    new, entropy = (x.detach() for x in random_logp(batch))
    whole = run(batch, new, entropy, batch.totals, config)
    generator = torch.Generator().manual_seed(0)
    for parts in (1, 2, 3, 8):
        order = torch.randperm(8, generator=generator)
        cuts = torch.randperm(7, generator=generator)[: parts - 1].sort().values + 1
        loss, gradients = torch.zeros_like(whole[0]), [torch.zeros_like(new) for _ in range(2)]
        sums = dict.fromkeys(whole[3], 0.0)
        for rows in order.tensor_split(cuts):
            part = batch.select(rows)
            width, padding = part.tokens.shape[1], int(torch.randint(0, 5, (), generator=generator))
            inputs = [F.pad(x[rows, :width], (0, padding), value=math.nan) for x in (new, entropy)]
            part_loss, *found, part_sums = run(_padded(part, padding), *inputs, batch.totals, config)
            loss += part_loss
            for gradient, part_gradient in zip(gradients, found, strict=True):
                gradient[rows, :width] = part_gradient[:, :width]
                assert not part_gradient[:, width:].any()
            for name in sums:
                sums[name] += float(part_sums[name])
        torch.testing.assert_close((loss, *gradients), whole[:3], rtol=1e-12, atol=1e-14)
        assert sums == pytest.approx({name: float(value) for name, value in whole[3].items()}, rel=1e-12)


def _padded(batch: TrainBatch, padding: int) -> TrainBatch:
    """`batch` with `padding` more columns, which hold NaN."""
    changes = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if value is not None and value.dim() == 2:
            fill = math.nan if value.is_floating_point() else 0
            changes[field.name] = F.pad(value, (0, padding), value=fill)
    return dataclasses.replace(batch, **changes)


def test_the_default_is_clipped_and_weighed_as_written_here_bit_for_bit() -> None:
    """DAPO's objective with truncated importance sampling, spelled out in the same FP32 operations."""
    for seed in range(20):
        batch = random_batch(rows=30, width=40, seed=seed)
        start = random_logp(batch)[0].detach().float()
        results = []
        for spelled_out in (False, True):
            new = start.clone().requires_grad_()
            if spelled_out:
                mask = batch.loss_mask
                advantage = batch.advantages.unsqueeze(1).expand_as(mask)[mask]
                ratio = (new[mask] - batch.old_logp[mask]).clamp(-20, 20).exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                weight = (batch.old_logp[mask] - batch.sampler_logp[mask]).clamp(-20, 20).exp().clamp(max=2.0)
                loss = -(weight * surrogate).sum() / int(mask.sum())
            else:
                loss, _ = policy_loss(batch, new, torch.zeros_like(new), batch.totals, ObjectiveConfig())
            loss.backward()
            results.append((loss.detach(), new.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.0, 1.0, False),
        (1.0, -1.0, False),
        (1.27, 1.0, False),
        (1.29, 1.0, True),  # above the upper bound, and a step would go further up
        (1.29, -1.0, False),  # above, but the step comes back
        (0.81, -1.0, False),
        (0.79, -1.0, True),
        (0.79, 1.0, False),
    ],
)
def test_gradient_in_and_out_of_the_clip_range(ratio: float, advantage: float, clipped: bool) -> None:
    _, gradient, sums = loss_of(-1.0 + math.log(ratio), -1.0, -1.0, advantage)
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-5)
    assert sums["clip_low_share"] + sums["clip_high_share"] == clipped
    assert sums["dual_clip_share"] == 0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (2.9, -1.0, 2.9, 2.9),
        (3.1, -1.0, 3.0, 0.0),  # beyond the bound the loss is constant
        (50.0, -2.0, 6.0, 0.0),
        (50.0, 1.0, -1.28, 0.0),  # a positive advantage meets the upper clip, never the dual clip
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    found = loss_of(-5.0 + math.log(ratio), -5.0, -5.0, advantage, ObjectiveConfig(dual_clip=3.0))
    assert found[:2] == pytest.approx((loss, gradient), rel=1e-5)
    assert found[2]["dual_clip_share"] == (gradient == 0 and advantage < 0)


def test_sums_agree_with_the_definitions() -> None:
    batch = random_batch(rows=20, width=20)
    new, entropy = random_logp(batch)
    config = ObjectiveConfig(dual_clip=1.5, kl=KLConfig(coefficient=0.1, estimator="k2"))
    _, sums = policy_loss(batch, new, entropy, batch.totals, config)
    expected = dict.fromkeys(sums, 0.0)
    for i, t in batch.loss_mask.nonzero().tolist():
        n, o, a = new[i, t].item(), batch.old_logp[i, t].item(), batch.advantages[i].item()
        r = math.exp(n - o)
        expected["ratio_mean"] += r
        expected["log_ratio_abs"] += abs(n - o)
        expected["approx_kl"] += r - 1 - (n - o)
        expected["clip_low_share"] += r < 0.8 and a < 0
        expected["clip_high_share"] += r > 1.28 and a > 0
        expected["dual_clip_share"] += r > 1.5 and a < 0
        expected["reference_kl"] += (n - batch.reference_logp[i, t].item()) ** 2 / 2
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(expected, rel=1e-4)
    assert all(expected.values())


def test_the_weight_is_a_constant_for_the_gradient() -> None:
    old = torch.tensor([[0.0, -1.0]], requires_grad=True)
    batch = make_batch(
        torch.tensor([[True]]), torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([1.0])
    )
    batch = dataclasses.replace(batch, old_logp=old)
    new = torch.tensor([[0.0, -1.0]])
    config = ObjectiveConfig(correction=CorrectionConfig(cap=10.0))
    policy_loss(batch, new, torch.zeros_like(new), batch.totals, config)[0].backward()
    # Only the ratio depends on old: d(-w * exp(new - old))/d(old) = w * r, with w = exp(1) and r = 1.
    assert old.grad[0, 1].item() == pytest.approx(math.e, rel=1e-5)


def test_without_correction_the_sampler_does_not_matter() -> None:
    config = ObjectiveConfig(correction=CorrectionConfig(weight="off"))
    assert loss_of(-1.0, -1.1, -9.0, 1.0, config)[:2] == loss_of(-1.0, -1.1, -1.1, 1.0, config)[:2]


def test_rejected_tokens_stay_in_the_denominator() -> None:
    """Of two equal tokens one is rejected: half of the loss is left, and none of it moves to the other."""
    logp = torch.full((1, 2), -1.0)
    batch = make_batch(torch.ones(1, 2) > 0, logp, torch.tensor([[-1.0, -9.0]]), torch.tensor([1.0]))
    config = ObjectiveConfig(correction=CorrectionConfig(token_band=(0.5, 5.0)))
    loss, gradient, _, _ = run(batch, batch.old_logp, batch.old_logp, batch.totals, config)
    assert loss.item() == pytest.approx(-0.5)
    assert gradient.tolist() == [[0.0, -0.5, 0.0]]


@each_config
def test_far_apart_log_probabilities_stay_finite(changes: dict[str, Any]) -> None:
    far = torch.tensor([[0.0, -500.0, 0.0], [-500.0, 0.0, -900.0], [-1.0, -1.0, -700.0]])
    mask = torch.ones(3, 3, dtype=torch.bool)
    for shift in range(3):
        old, sampler, reference = far, far.roll(shift, 0), far.roll(1, 1)
        batch = make_batch(mask, old, sampler, torch.tensor([1.0, -1.0, -2.0]), reference)
        new = F.pad(far.roll(1, 0), (1, 0))
        loss, *gradients, sums = run(batch, new, new, batch.totals, ObjectiveConfig(**changes))
        assert all(bool(value.isfinite().all()) for value in (loss, *gradients, *sums.values()))


@each_config
@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_values_outside_the_mask_change_nothing(changes: dict[str, Any], poison: float) -> None:
    config = ObjectiveConfig(**changes)
    batch = random_batch(per_token=True)
    new, entropy = (x.detach() for x in random_logp(batch))
    names = ("old_logp", "sampler_logp", "reference_logp", "advantages")
    results = []
    for outside in (0.0, poison):
        parts = {name: getattr(batch, name).where(batch.loss_mask, outside) for name in names}
        inputs = (x.where(batch.loss_mask, outside) for x in (new, entropy))
        loss, *gradients, sums = run(dataclasses.replace(batch, **parts), *inputs, batch.totals, config)
        results.append([loss, *gradients, *sums.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not results[0][1][~batch.loss_mask].any() and results[0][1].any()


def test_a_kl_penalty_in_the_loss_needs_a_reference() -> None:
    batch = dataclasses.replace(random_batch(), reference_logp=None)
    with pytest.raises(ValueError, match="needs the reference_logp"):
        run(batch, *random_logp(batch), batch.totals, ObjectiveConfig(kl=KLConfig(coefficient=0.1)))


def test_negative_log_likelihood_is_a_token_mean() -> None:
    logp = torch.tensor([[-1.0, -2.0], [-4.0, -8.0]])
    mask = torch.tensor([[True, False], [True, True]])
    assert negative_log_likelihood(logp, mask, 3).item() == pytest.approx(13 / 3)

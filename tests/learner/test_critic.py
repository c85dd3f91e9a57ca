from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from learner.batch import TrainBatch
from learner.config import CriticConfig
from learner.critic import Critic
from learner.policy import Policy
from tests.learner.conftest import MakeFolder, Sequences, config, hidden_states, precision_map

UNCLIPPED = CriticConfig(value_clip=None, lr_factor=1.0)


def make_critic(
    folder: Path, spec: str = "fp32", critic: CriticConfig = UNCLIPPED, **changes: object
) -> Critic:
    return Critic(folder, precision_map(spec), config(**changes), critic, seed=0)


def make_batch(critic: Critic, sequences: Sequences, seed: int = 5) -> TrainBatch:
    """Returns of 0 or 1, the same for all tokens of a response."""
    tokens, _, mask = sequences
    generator = torch.Generator().manual_seed(seed)
    outcomes = torch.randint(0, 2, (len(tokens), 1), generator=generator).float()
    unused = torch.zeros(mask.shape)
    returns = outcomes.expand_as(mask).contiguous()
    return TrainBatch(
        *sequences, unused, unused, unused, old_values=critic.values(*sequences), returns=returns
    )


def trained(critic: Critic, sequences: Sequences, steps: int = 5) -> list[float]:
    """`steps` updates; the loss of each."""
    return [critic.update(make_batch(critic, sequences))["loss"] for _ in range(steps)]


def weights(critic: Critic) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in critic.model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("tied", [False, True])
def test_it_begins_as_the_policy_with_values_of_zero(
    model_folder: MakeFolder, sequences: Sequences, family: str, tied: bool
) -> None:
    folder = model_folder(family, tie_word_embeddings=tied)
    critic = make_critic(folder)
    policy = Policy(folder, precision_map("fp32"), config(), seed=0)
    tokens, _, mask = sequences
    assert torch.equal(critic.values(*sequences), torch.zeros(mask.shape))
    assert torch.equal(hidden_states(critic, tokens), hidden_states(policy, tokens))
    head = {"value_head.weight", "value_head.bias"}
    assert weights(critic).keys() - head == {
        name for name, _ in policy.model.named_parameters() if name != "output_layer.weight"
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_value_is_that_of_the_state_before_its_token(
    model_folder: MakeFolder, sequences: Sequences, dtype: str
) -> None:
    """Changing token t changes no value up to and including position t, and some after it."""
    critic = make_critic(model_folder("qwen3_moe"), dtype=dtype)
    trained(critic, sequences)
    tokens, lengths, mask = sequences
    before = critic.values(*sequences)
    assert before.dtype == torch.float32 and not before[~mask].any() and before[mask].all()
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 7
    after = critic.values(changed, lengths, mask)
    torch.testing.assert_close(after[0, :7], before[0, :7])
    assert (after[0, 7:] != before[0, 7:]).all()


def test_values_agree_with_float64_and_do_not_depend_on_micro_batches(
    model_folder: MakeFolder, sequences: Sequences
) -> None:
    critic = make_critic(model_folder("mixtral"), micro_batch_tokens=12)
    trained(critic, sequences)
    tokens, _, mask = sequences
    head = critic.model.value_head
    hidden = hidden_states(critic, tokens).double()[:, :-1]
    expected = (hidden @ head.weight.double().T + head.bias.double()).squeeze(2)
    torch.testing.assert_close(
        critic.values(*sequences)[:, 1:].double(), expected.where(mask[:, 1:], 0.0), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("spec", "dtype"), [("fp32", "float32"), ("minite", "float32"), ("minite", "bfloat16")]
)
def test_it_learns_the_returns(model_folder: MakeFolder, sequences: Sequences, spec: str, dtype: str) -> None:
    critic = make_critic(model_folder("qwen3_moe"), spec, lr=3e-3, dtype=dtype)
    losses = trained(critic, sequences, steps=20)
    batch = make_batch(critic, sequences)
    assert losses[0] == pytest.approx(batch.in_loss("returns").square().mean().item() / 2)
    assert losses[-1] < losses[0] / 4


def test_the_update_follows_the_gradient_of_its_loss(model_folder: MakeFolder, sequences: Sequences) -> None:
    """Central differences along the gradient, the weights moved by hand; the bound bites on some tokens."""
    critic = make_critic(
        model_folder("mixtral"), critic=CriticConfig(value_clip=0.1, lr_factor=1e-9), grad_clip=0.0
    )
    batch = make_batch(critic, sequences)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        critic.model.value_head.weight.normal_(0, 0.05, generator=generator)
    found: dict[str, torch.Tensor] = {}
    step = critic.optimizer.step

    def record(lr: float | None = None) -> tuple[float, float]:
        found.update({name: master.grad.clone() for name, master in critic.optimizer.masters.items()})
        return step(lr)

    critic.optimizer.step = record
    metrics = critic.update(batch)
    del critic.optimizer.step
    assert 0 < metrics["value_clip_share"] < 1
    start, norm = weights(critic), torch.stack([g.norm() for g in found.values()]).norm()
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, parameter in critic.model.named_parameters():
                parameter.copy_(start[name] + sign * 1e-3 / norm * found[name])
        losses.append(critic.update(batch)["loss"])
    assert losses[0] - losses[1] == pytest.approx(2e-3 * norm.item(), rel=0.02)


def test_loss_and_step_do_not_depend_on_micro_batches(model_folder: MakeFolder, sequences: Sequences) -> None:
    """With a large eps, so that AdamW does not blow rounding up."""
    results = []
    for micro_batch_tokens in (1000, 12):
        critic = make_critic(model_folder("qwen3_moe"), eps=1e-2, micro_batch_tokens=micro_batch_tokens)
        metrics = [critic.update(make_batch(critic, sequences)) for _ in range(3)]
        results.append((metrics, weights(critic)))
    assert results[1][0][-1] == pytest.approx(results[0][0][-1], rel=1e-5)
    for name, weight in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], weight, rtol=1e-5, atol=1e-6)


def test_it_has_a_learning_rate_of_its_own(model_folder: MakeFolder, sequences: Sequences) -> None:
    for factor, expected in ((10.0, 1e-2), (0.5, 5e-4)):
        critic = make_critic(model_folder("mixtral"), critic=CriticConfig(lr_factor=factor))
        assert critic.update(make_batch(critic, sequences))["lr"] == pytest.approx(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_critic_goes_on_bit_for_bit(
    model_folder: MakeFolder, sequences: Sequences, tmp_path: Path, dtype: str
) -> None:
    whole, resumed = (
        make_critic(model_folder("qwen3_moe"), "minite", dtype=dtype, warmup_steps=6) for _ in range(2)
    )
    trained(whole, sequences, steps=2)
    whole.checkpoint(tmp_path / "step")
    trained(resumed, sequences, steps=3)
    resumed.restore(tmp_path / "step")
    assert resumed.steps == 2
    assert trained(resumed, sequences, steps=2) == trained(whole, sequences, steps=2)
    other = weights(resumed)
    assert all(torch.equal(weight, other[name]) for name, weight in weights(whole).items())


def test_a_checkpoint_of_the_policy_is_refused(model_folder: MakeFolder, tmp_path: Path) -> None:
    Policy(model_folder("mixtral"), precision_map("fp32"), config(), 0).checkpoint(tmp_path / "policy")
    with pytest.raises(ValueError, match="not those of this model"):
        make_critic(model_folder("mixtral")).restore(tmp_path / "policy")


def test_what_it_cannot_learn_from_is_refused(model_folder: MakeFolder, sequences: Sequences) -> None:
    critic = make_critic(model_folder("mixtral"))
    batch = make_batch(critic, sequences)
    before = weights(critic)
    with pytest.raises(ValueError, match="old_values and returns, which the batch does not have"):
        critic.update(dataclasses.replace(batch, returns=None))
    returns = batch.returns.clone()
    returns[0, 3] = float("inf")
    with pytest.raises(FloatingPointError, match=r"1 of \d+ values of returns"):
        critic.update(dataclasses.replace(batch, returns=returns))
    with torch.no_grad():
        critic.model.value_head.bias.fill_(float("nan"))
    count = int(sequences[2].sum())
    with pytest.raises(FloatingPointError, match=f"{count} of {count} values of the critic"):
        critic.values(*sequences)
    with torch.no_grad():
        critic.model.value_head.bias.zero_()
    assert all(torch.equal(weight, before[name]) for name, weight in weights(critic).items())

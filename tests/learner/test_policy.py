from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import backends
from kernels.catalogue import named_spec
from kernels.digest import tensor_digest
from kernels.experts import ExpertWeights, StoredLayout, derived_name, wire_name
from kernels.precision_map import PrecisionMap
from kernels.reference import prepare
from learner.batch import TrainBatch
from learner.config import CorrectionConfig, CriticConfig, KLConfig, ObjectiveConfig
from learner.folders import read_state
from learner.policy import Policy
from tests.learner.conftest import LAYERS, VOCAB, MakeFolder, Sequences, config, hidden_states, precision_map

OBJECTIVE = ObjectiveConfig()
# Every term, and statistics of whole sequences.
EVERYTHING = ObjectiveConfig(
    dual_clip=1.5,
    loss_aggregation="sequence_mean",
    entropy_coefficient=0.1,
    correction=CorrectionConfig(weight="sequence", sequence_band=(0.7, 1.4)),
    kl=KLConfig(coefficient=0.2),
)


def make_policy(folder: Path, spec: str = "fp32", **changes: object) -> Policy:
    return Policy(folder, precision_map(spec), config(**changes), seed=0)


def make_batch(policy: Policy, sequences: Sequences, temperature: float = 1.0) -> TrainBatch:
    """Log-probabilities away from the policy's, so that both clips and the truncation happen."""
    old = policy.score(*sequences, temperature).logp
    generator = torch.Generator().manual_seed(5)
    noise = [0.4 * torch.randn(old.shape, generator=generator) for _ in range(2)]
    advantages = torch.randn(len(old), generator=generator)
    return TrainBatch(*sequences, old + noise[0], old + noise[1], advantages, reference_logp=old - noise[0])


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def gradients(
    policy: Policy, batch: TrainBatch, objective: ObjectiveConfig = OBJECTIVE, top_p: float = 1.0
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of an update, and the gradient that reached the optimiser."""
    found: dict[str, torch.Tensor] = {}
    step = policy.optimizer.step

    def record(lr: float | None = None) -> tuple[float, float]:
        found.update({name: m.grad.clone() for name, m in policy.optimizer.masters.items()})
        return step(lr)

    policy.optimizer.step = record
    try:
        return policy.update(batch, objective, 1.0, top_p), found
    finally:
        del policy.optimizer.step


def test_scores_agree_with_float64(model_folder: MakeFolder, sequences: Sequences) -> None:
    policy = make_policy(model_folder("qwen3_moe"))
    tokens, _, mask = sequences
    scores = policy.score(*sequences, temperature=0.7)
    assert not scores.outside_nucleus.any()
    logits = hidden_states(policy, tokens).double() @ policy.model.output_weight.double().T
    before = torch.distributions.Categorical(logits=logits[:, :-1] / 0.7)
    rows, positions = mask.nonzero(as_tuple=True)
    expected_logp = before.log_prob(tokens[:, 1:])[rows, positions - 1]
    expected_entropy = before.entropy()[rows, positions - 1]
    torch.testing.assert_close(scores.logp[mask].double(), expected_logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy[mask].double(), expected_entropy, rtol=0, atol=1e-5)
    assert scores.logp.dtype == scores.entropy.dtype == torch.float32
    assert not scores.logp[~mask].any() and not scores.entropy[~mask].any()


def test_scores_under_top_p_are_those_of_the_nucleus(model_folder: MakeFolder, sequences: Sequences) -> None:
    policy = make_policy(model_folder("qwen3_moe"))
    tokens, _, mask = sequences
    scores = policy.score(*sequences, temperature=0.7, top_p=0.6)
    logits = hidden_states(policy, tokens).double() @ policy.model.output_weight.double().T / 0.7
    rows, positions = mask.nonzero(as_tuple=True)
    outside = 0
    for row, t in zip(rows.tolist(), positions.tolist(), strict=True):
        p, token = logits[row, t - 1].softmax(-1), int(tokens[row, t])
        ranked = p.argsort(descending=True)
        own = ranked[: int((p[ranked].cumsum(0) < 0.6).sum()) + 1].tolist()
        assert scores.outside_nucleus[row, t].item() == (token not in own)
        kept = p[list({*own, token})]
        assert scores.logp[row, t].item() == pytest.approx((p[token] / kept.sum()).log().item(), abs=2e-5)
        outside += token not in own
    assert outside and not scores.outside_nucleus[~mask].any()


@pytest.mark.parametrize("spec", ["fp32", "minite"])
def test_scores_do_not_depend_on_padding_or_company(
    model_folder: MakeFolder, sequences: Sequences, spec: str
) -> None:
    policy = make_policy(model_folder("qwen3_moe"), spec)
    tokens, lengths, mask = sequences
    together = policy.score(tokens, lengths, mask, 1.0).logp
    other = tokens.where(torch.arange(12) < lengths[:, None], (tokens + 7) % VOCAB)
    assert torch.equal(policy.score(other, lengths, mask, 1.0).logp, together)
    for row, length in enumerate(lengths.tolist()):
        part = (slice(row, row + 1), slice(0, length))
        alone = policy.score(tokens[part], lengths[row : row + 1], mask[part], 1.0).logp
        torch.testing.assert_close(alone[0], together[row, :length], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "objective", "top_p"),
    [("qwen3_moe", OBJECTIVE, 1.0), ("mixtral", OBJECTIVE, 1.0), ("mixtral", EVERYTHING, 0.9)],
    ids=["qwen3_moe", "mixtral", "every term"],
)
def test_loss_and_gradient_do_not_depend_on_micro_batches(
    model_folder: MakeFolder, sequences: Sequences, family: str, objective: ObjectiveConfig, top_p: float
) -> None:
    batch = make_batch(make_policy(model_folder(family)), sequences)
    results = []
    for micro_batch_tokens, parts in ((1000, 1), (30, 2), (12, 4)):
        policy = make_policy(model_folder(family), micro_batch_tokens=micro_batch_tokens)
        results.append(gradients(policy, batch, objective, top_p))
        assert policy.report().expert_calls == parts * LAYERS
    metrics, reference = results[0]
    assert metrics["clip_low_share"] + metrics["clip_high_share"] > 0
    assert metrics["tokens"] == sequences[2].sum()
    for other_metrics, other in results[1:]:
        assert other_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-6)
        difference = torch.stack([(other[name] - gradient).norm() for name, gradient in reference.items()])
        assert difference.norm() < 1e-6 * metrics["grad_norm"]
        for name, gradient in reference.items():
            assert (other[name] - gradient).norm() < 5e-6 * gradient.norm(), name


def test_update_follows_the_gradient_of_the_objective(model_folder: MakeFolder, sequences: Sequences) -> None:
    """Central differences of the loss along the gradient, with the weights moved by hand."""
    policy = make_policy(model_folder("mixtral"), grad_clip=0.0, lr=1e-12)
    batch = make_batch(policy, sequences)
    _, gradient = gradients(policy, batch)
    start = weights(policy)
    size = 1e-3 / torch.stack([g.norm() for g in gradient.values()]).norm()
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                parameter.copy_(start[name] + sign * size * gradient[name])
        losses.append(policy.update(batch, OBJECTIVE, 1.0)["loss"])
    slope = (losses[0] - losses[1]) / 2
    assert slope == pytest.approx(1e-3 * (1e-3 / size).item(), rel=0.02)


def test_the_entropy_bonus_raises_the_entropy(model_folder: MakeFolder, sequences: Sequences) -> None:
    """With advantages of zero nothing else moves the weights."""
    policy = make_policy(model_folder("mixtral"))
    scores = policy.score(*sequences, 1.0)
    batch = TrainBatch(*sequences, scores.logp, scores.logp, torch.zeros(len(scores.logp)))
    assert gradients(policy, batch)[0]["grad_norm"] == 0
    policy.update(batch, ObjectiveConfig(entropy_coefficient=1.0), 1.0)
    mask = sequences[2]
    assert policy.score(*sequences, 1.0).entropy[mask].mean() > scores.entropy[mask].mean() + 1e-3


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_penalty_pulls_towards_the_reference(
    model_folder: MakeFolder, sequences: Sequences, estimator: str
) -> None:
    policy = make_policy(model_folder("mixtral"))
    start = policy.score(*sequences, 1.0).logp
    policy.supervised_step(*sequences)
    moved = policy.score(*sequences, 1.0).logp
    advantages = torch.zeros(len(start))
    batch = TrainBatch(*sequences, moved, moved, advantages, reference_logp=start)
    metrics = policy.update(batch, ObjectiveConfig(kl=KLConfig(coefficient=1.0, estimator=estimator)), 1.0)
    assert metrics["reference_kl"] > 0
    back = policy.score(*sequences, 1.0).logp
    assert (back - start).abs().mean() < (moved - start).abs().mean()


def test_a_critic_changes_nothing_in_the_update_of_the_policy(
    model_folder: MakeFolder, sequences: Sequences
) -> None:
    batch = make_batch(make_policy(model_folder("mixtral")), sequences)
    results = []
    for critic in (None, CriticConfig()):
        policy = make_policy(model_folder("mixtral"))
        results.append((policy.update(batch, ObjectiveConfig(critic=critic), 1.0), weights(policy)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(weight, results[1][1][name]) for name, weight in results[0][1].items())


def test_a_policy_that_only_scores_holds_no_optimiser(model_folder: MakeFolder, sequences: Sequences) -> None:
    policy = make_policy(model_folder("mixtral"), dtype="bfloat16")
    policy.score(*sequences, 1.0)
    assert "optimizer" not in vars(policy)
    policy.supervised_step(*sequences)
    assert "optimizer" in vars(policy)


def test_first_update_on_fresh_scores_has_ratio_one(model_folder: MakeFolder, sequences: Sequences) -> None:
    policy = make_policy(model_folder("qwen3_moe"), "minite")
    temperature = 0.6
    old = policy.score(*sequences, temperature).logp
    batch = TrainBatch(*sequences, old, old, torch.ones(len(old)))
    metrics = policy.update(batch, OBJECTIVE, temperature)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["loss"] == pytest.approx(-1, abs=1e-6)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_low_share"] == metrics["clip_high_share"] == metrics["dual_clip_share"] == 0
    assert metrics["lr"] == 1e-3 and metrics["grad_norm"] > 0 and policy.steps == 1


def test_update_raises_the_probability_of_what_was_good(
    model_folder: MakeFolder, sequences: Sequences
) -> None:
    policy = make_policy(model_folder("qwen3_moe"), "minite")
    old = policy.score(*sequences, 1.0).logp
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0])
    policy.update(TrainBatch(*sequences, old, old, advantages), OBJECTIVE, 1.0)
    change = (policy.score(*sequences, 1.0).logp - old).sum(1)
    assert (change * advantages).sum() > 0.1


@pytest.mark.parametrize(
    ("spec", "dtype"), [("minite", "float32"), ("minite", "bfloat16"), ("fp32", "float32")]
)
def test_supervised_steps_lower_the_loss(
    model_folder: MakeFolder, sequences: Sequences, spec: str, dtype: str
) -> None:
    policy = make_policy(model_folder("qwen3_moe"), spec, dtype=dtype)
    mask = sequences[2]
    expected = -policy.score(*sequences, 1.0).logp[mask].mean().item()
    losses = [policy.supervised_step(*sequences, lr=3e-3) for _ in range(4)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[0] > losses[1] > losses[2] > losses[3]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_outside_the_mask_is_harmless(
    model_folder: MakeFolder, sequences: Sequences, poison: float
) -> None:
    mask = sequences[2]
    results = []
    for outside in (0.0, poison):
        policy = make_policy(model_folder("mixtral"))
        batch = make_batch(policy, sequences)
        changes = {name: getattr(batch, name).where(mask, outside) for name in ("old_logp", "sampler_logp")}
        metrics = policy.update(dataclasses.replace(batch, **changes), OBJECTIVE, 1.0)
        results.append((metrics, weights(policy)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(w, results[1][1][name]) for name, w in results[0][1].items())


@pytest.mark.parametrize("field", ["old_logp", "sampler_logp", "advantages", "reference_logp"])
def test_inputs_that_are_not_finite_stop_the_update(
    model_folder: MakeFolder, sequences: Sequences, field: str
) -> None:
    policy = make_policy(model_folder("mixtral"))
    batch = make_batch(policy, sequences)
    before = weights(policy)
    getattr(batch, field).view(-1)[2] = float(
        "nan"
    )  # in the loss: of token 2, or of all tokens of sequence 2
    with pytest.raises(
        FloatingPointError, match=rf"{7 if field == 'advantages' else 1} of \d+ values of {field}"
    ):
        policy.update(batch, OBJECTIVE, 1.0)
    assert all(torch.equal(w, before[name]) for name, w in weights(policy).items())


def test_log_probabilities_that_are_not_finite_are_counted(
    model_folder: MakeFolder, sequences: Sequences
) -> None:
    policy = make_policy(model_folder("mixtral"))
    batch = make_batch(policy, sequences)
    before = weights(policy)
    with torch.no_grad():
        policy.model.output_layer.weight[0, 0] = float("nan")
    count = int(sequences[2].sum())
    with pytest.raises(FloatingPointError, match=f"{count} of {count} log-probabilities"):
        policy.score(*sequences, 1.0)
    with pytest.raises(FloatingPointError, match=f"{count} of {count} log-probabilities"):
        policy.update(batch, OBJECTIVE, 1.0)
    with torch.no_grad():
        policy.model.output_layer.weight.copy_(before["output_layer.weight"])
    assert all(torch.equal(w, before[name]) for name, w in weights(policy).items())


def test_what_a_failed_update_left_behind_does_not_leak_into_the_next(
    model_folder: MakeFolder, sequences: Sequences
) -> None:
    tokens, lengths, mask = sequences
    rare = VOCAB - 1
    tokens = tokens.where(tokens != rare, 0)
    tokens[1, 0] = rare  # in the last of four micro-batches only
    policy, fresh = (make_policy(model_folder("mixtral"), micro_batch_tokens=12) for _ in range(2))
    batch = make_batch(fresh, (tokens, lengths, mask))
    embedding = policy.model.embedding.word_embeddings.weight
    with torch.no_grad():
        kept = embedding[rare].clone()
        embedding[rare] = float("nan")
    with pytest.raises(FloatingPointError, match="3 of 8 log-probabilities"):
        policy.update(batch, OBJECTIVE, 1.0)
    with torch.no_grad():
        embedding[rare] = kept
    assert policy.update(batch, OBJECTIVE, 1.0) == fresh.update(batch, OBJECTIVE, 1.0)


def test_sequences_that_do_not_fit_the_model_are_refused(
    model_folder: MakeFolder, sequences: Sequences
) -> None:
    policy = make_policy(model_folder("mixtral"))
    tokens, lengths, mask = sequences
    with pytest.raises(ValueError, match=rf"tokens must lie in \[0, {VOCAB}\)"):
        policy.score(tokens + VOCAB, lengths, mask, 1.0)
    with pytest.raises(ValueError, match="has 65 tokens, the model has 64 positions"):
        policy.score(torch.zeros(1, 65, dtype=torch.int64), torch.tensor([65]), torch.zeros(1, 65) > 0, 1.0)
    with pytest.raises(ValueError, match="no token in its loss mask"):
        policy.supervised_step(tokens, lengths, torch.zeros_like(mask))


def test_a_precision_map_that_does_not_fit_is_refused(model_folder: MakeFolder) -> None:
    with pytest.raises(ValueError, match="has 2 layers, the model has 1"):
        make_policy(model_folder("mixtral", num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"'minite': 16 must divide the expert width, got 40"):
        make_policy(model_folder("mixtral", intermediate_size=40), "minite")


@pytest.mark.parametrize("spec", ["minite", "minite_expert", "bf16", "fp32"])
def test_export_holds_the_masters_under_the_spec(
    model_folder: MakeFolder, sequences: Sequences, spec: str
) -> None:
    policy = make_policy(model_folder("qwen3_moe"), spec)
    policy.supervised_step(*sequences)
    exported = dict(policy.export())
    for layer, execution_spec in enumerate(policy.precision_map.layers):
        prefix = f"decoder.layers.{layer}.mlp.experts.weight"
        masters = (weights(policy)[f"{prefix}1"], weights(policy)[f"{prefix}2"])
        for part, tensor in ExpertWeights.quantize(*masters, execution_spec).tensors().items():
            assert tensor_digest(exported.pop(wire_name(layer, part))) == tensor_digest(tensor)
    outside = {n: t for n, t in read_state(policy.model_dir).items() if ".experts." not in n}
    assert {n: (t.shape, t.dtype) for n, t in exported.items()} == {
        n: (t.shape, t.dtype) for n, t in outside.items()
    }


def test_export_under_the_map_of_a_sampler_that_differs(model_folder: MakeFolder) -> None:
    policy = make_policy(model_folder("qwen3_moe"), "minite")
    other = make_policy(model_folder("qwen3_moe"), "minite_expert")
    asked, own = dict(policy.export(other.precision_map)), dict(other.export())
    assert asked.keys() == own.keys()
    assert all(tensor_digest(tensor) == tensor_digest(own[name]) for name, tensor in asked.items())


def test_an_export_in_tiles_holds_the_same_weights(model_folder: MakeFolder) -> None:
    """As for a sampler on a GPU; the layers in BF16 have no other layout."""
    folder = model_folder("qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    policy = make_policy(folder, "minite")
    target = PrecisionMap.resolve(LAYERS, named_spec("minite"), last_layers_bf16=1)
    rows, tiles = (dict(policy.export(target, layout)) for layout in StoredLayout)
    assert policy.export_layout(target, StoredLayout.TILES) == {
        name: (tuple(t.shape), t.dtype) for name, t in tiles.items()
    }
    derived = [dict(policy.export_derived(target, layout)) for layout in StoredLayout]
    assert derived[0].keys() == derived[1].keys()
    assert all(torch.equal(tensor, derived[1][name]) for name, tensor in derived[0].items())
    for layer, spec in enumerate(target.layers):
        prefix = wire_name(layer, "")
        found = [
            ExpertWeights.from_tensors(
                {name.removeprefix(prefix): own.pop(name) for name in list(own) if name.startswith(prefix)},
                spec,
            )
            for own in (rows, tiles)
        ]
        assert found[1].layout is (StoredLayout.ROWS if layer == LAYERS - 1 else StoredLayout.TILES)
        back = found[1].in_layout(StoredLayout.ROWS).tensors()
        assert all(torch.equal(tensor, back[part]) for part, tensor in found[0].tensors().items())
    assert rows.keys() == tiles.keys()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_what_is_said_of_an_export_is_what_comes(
    model_folder: MakeFolder, sequences: Sequences, family: str
) -> None:
    """Names, shapes and types ahead of it; the operands that it is quantised from; what engines derive from it."""
    policy = make_policy(model_folder(family), "minite")
    policy.supervised_step(*sequences)
    for target in (policy.precision_map, PrecisionMap.resolve(LAYERS, named_spec("bf16"))):
        exported = dict(policy.export(target))
        layout = policy.export_layout(target)
        assert list(layout) == list(exported)
        assert layout == {name: (tuple(t.shape), t.dtype) for name, t in exported.items()}
        operands, derived = (
            dict(policy.export_operands(target)),
            dict(policy.export_derived(target)),
        )
        for layer, spec in enumerate(target.layers):
            pair = (operands.pop(wire_name(layer, f"{matrix}.weight")) for matrix in ("w13", "w2"))
            quantized = ExpertWeights.quantize(*pair, spec)
            for part, tensor in quantized.tensors().items():
                assert tensor_digest(tensor) == tensor_digest(exported.pop(wire_name(layer, part)))
            for part, tensor in prepare(quantized, spec).derived().items():
                assert tensor_digest(tensor) == tensor_digest(derived.pop(derived_name(layer, part)))
        assert not derived
        assert {n: tensor_digest(t) for n, t in operands.items()} == {
            n: tensor_digest(t) for n, t in exported.items()
        }


def test_forward_passes_and_exports_share_one_quantisation(
    model_folder: MakeFolder, sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(model_folder("qwen3_moe"), "minite")
    made: list[str] = []

    def counted(*arguments: Any) -> ExpertWeights:
        made.append(arguments[-1].name)
        return ExpertWeights.quantize(*arguments)

    counting = dataclasses.replace(backends.REFERENCE, quantize=counted)
    monkeypatch.setattr(backends, "choose", lambda spec, device: counting)
    for version in (1, 2):
        first = dict(policy.export())
        policy.score(*sequences, 1.0)
        dict(policy.export_derived())
        second = dict(policy.export())
        names = [name for name in first if ".experts." in name]
        assert [first[name].data_ptr() for name in names] == [second[name].data_ptr() for name in names]
        assert len(made) == version * LAYERS
        policy.supervised_step(*sequences)  # under the weights before it, which are quantised already


def test_each_layer_runs_and_travels_under_its_own_spec(
    model_folder: MakeFolder, sequences: Sequences
) -> None:
    mixed = PrecisionMap.resolve(LAYERS, named_spec("minite"), first_layers_bf16=1)
    policy = Policy(model_folder("qwen3_moe"), mixed, config(), seed=0)
    exported = dict(policy.export())
    assert exported[wire_name(0, "w13.weight")].dtype == torch.bfloat16
    assert exported[wire_name(1, "w13.codes")].dtype == torch.uint8
    assert wire_name(0, "w13.codes") not in exported and wire_name(1, "w13.weight") not in exported
    scores = {
        spec: make_policy(model_folder("qwen3_moe"), spec).score(*sequences, 1.0).logp
        for spec in ("minite", "bf16", "fp32")
    }
    found = policy.score(*sequences, 1.0).logp
    distance = {spec: (logp - scores["fp32"]).abs().mean() for spec, logp in scores.items()}
    assert distance["bf16"] < (found - scores["fp32"]).abs().mean() < distance["minite"]


def test_a_tied_output_layer_is_not_exported(model_folder: MakeFolder) -> None:
    names = dict(make_policy(model_folder("mixtral", tie_word_embeddings=True)).export())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


_FRESH_PROCESS = """
import sys
from pathlib import Path
from typing import Any
import torch
torch.set_num_threads(int(sys.argv[2]))
from tests.learner import test_policy
print(test_policy.fingerprint(Path(sys.argv[1])))
"""


def fingerprint(folder: Path) -> str:
    """Of the scores and weights after an update."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (6, 12), generator=generator)
    mask = torch.ones(6, 12, dtype=torch.bool)
    mask[:, :2] = False
    sequences = (tokens, torch.full((6,), 12), mask)
    policy = make_policy(folder, "minite")
    policy.update(make_batch(policy, sequences), OBJECTIVE, 1.0)
    state = {**weights(policy), "logp": policy.score(*sequences, 1.0).logp}
    return hashlib.sha256("".join(tensor_digest(state[name]) for name in sorted(state)).encode()).hexdigest()


def test_a_fresh_process_computes_the_same_bits(model_folder: MakeFolder) -> None:
    folder = model_folder("qwen3_moe")
    arguments = [sys.executable, "-c", _FRESH_PROCESS, str(folder), str(torch.get_num_threads())]
    other = subprocess.run(arguments, check=True, capture_output=True, text=True)
    assert other.stdout.split()[-1] == fingerprint(folder)


def test_what_a_quantiser_refuses_is_named_by_layer_and_expert(
    model_folder: MakeFolder, sequences: Sequences
) -> None:
    """Before any weight has changed, and the next call does not know of it."""
    tokens, lengths, mask = sequences
    rare = VOCAB - 1
    tokens = tokens.where(tokens != rare, 0)
    tokens[1, 0] = rare
    policy, fresh = (make_policy(model_folder("mixtral"), "minite", micro_batch_tokens=12) for _ in range(2))
    batch = make_batch(fresh, (tokens, lengths, mask))
    before = weights(policy)
    embedding = policy.model.embedding.word_embeddings.weight
    with torch.no_grad():
        kept = embedding[rare].clone()
        embedding[rare] = float("inf")
    named = r"values that are not finite reached a quantiser: layer 0: FC1 input of expert \d"
    with pytest.raises(ValueError, match=named):
        policy.score(tokens, lengths, mask, 1.0)
    with pytest.raises(ValueError, match=named):
        policy.update(batch, OBJECTIVE, 1.0)
    with torch.no_grad():
        embedding[rare] = kept
    assert all(torch.equal(w, before[name]) for name, w in weights(policy).items())
    assert policy.update(batch, OBJECTIVE, 1.0) == fresh.update(batch, OBJECTIVE, 1.0)


def test_stochastic_rounding_in_backward_goes_on_from_a_checkpoint(
    model_folder: MakeFolder, sequences: Sequences, tmp_path: Path
) -> None:
    """The recipe of Transformer Engine, whose gradients are rounded stochastically from torch's generator."""
    policies = [make_policy(model_folder("qwen3_moe"), "te_per_tensor") for _ in range(2)]
    for policy in policies:
        torch.manual_seed(0)
        policy.supervised_step(*sequences)
    first, second = (weights(policy) for policy in policies)
    assert all(torch.equal(w, second[name]) for name, w in first.items())

    policies[0].checkpoint(tmp_path / "checkpoint")
    policies[0].supervised_step(*sequences)
    torch.manual_seed(1)
    policies[1].supervised_step(*sequences)
    first, second = (weights(policy) for policy in policies)
    assert not all(torch.equal(w, second[name]) for name, w in first.items())
    policies[1].restore(tmp_path / "checkpoint")
    policies[1].supervised_step(*sequences)
    assert all(torch.equal(w, first[name]) for name, w in weights(policies[1]).items())


@pytest.mark.parametrize("spec", ["fp32", "minite"])
def test_recomputed_activations_are_the_same_bits(
    model_folder: MakeFolder, sequences: Sequences, spec: str
) -> None:
    """Replayed experts included; each layer is computed twice in an update, and once in a score."""
    found = []
    for recompute in (False, True):
        policy = make_policy(model_folder("qwen3_moe"), spec, recompute=recompute)
        own = policy.score(*sequences, 1.0, return_routes=True).routes
        batch = make_batch(policy, sequences)
        batch = dataclasses.replace(batch, routes=torch.where(own < 0, own, (own + 1) % 8))
        before = policy.report().expert_calls
        metrics, gradient = gradients(policy, batch)
        found.append((metrics, gradient, policy.report().expert_calls - before))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], own) for name, own in found[0][1].items())
    assert found[1][2] == 2 * found[0][2]

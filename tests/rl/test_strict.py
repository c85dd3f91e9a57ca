"""Under the strict spec two real engines agree on every log-probability, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.fields import Specification
from kernels.model_spec import ModelSpec
from kernels.precision_map import PrecisionMap
from learner.batch import TrainBatch
from learner.config import LearnerConfig, ObjectiveConfig
from learner.initialize import initialize
from learner.packing import Packing
from learner.policy import Policy
from tests.rl import strict_rollouts
from tests.rl.strict_rollouts import ALONE, LAYERS, OTHER, PROMPTS, TEMPERATURE, TOKENS, VOCAB, WAYS, Row

pytestmark = pytest.mark.slow

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "one_layer": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {
        **_COMMON,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "intermediate_size": 48,
        "tie_word_embeddings": True,
    },
}
Saved = dict[Any, Any]
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strict")
    for family, model in MODELS.items():
        initialize(folder / family, model, seed=0)
    return folder


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def saved(place: Path, device: str) -> Saved:
    command = [sys.executable, "-m", strict_rollouts.__name__, str(place), device]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return torch.load(place / f"saved_{device}.pt")


def learner(place: Path, family: str = "qwen3_moe", spec: Any = None, **changes: Any) -> Policy:
    layers = MODELS[family]["num_hidden_layers"]
    precision_map = PrecisionMap.resolve(layers, spec or named_spec("strict"))
    return Policy(place / family, precision_map, LearnerConfig(lr=1e-2, **changes), seed=0)


def batch_of(rows: list[Row]) -> TrainBatch:
    """old_logp: the sampler's."""
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response, _ in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    mask, logp = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(tokens.shape)
    for number, (prompt, response, own) in enumerate(rows):
        end = int(lengths[number])
        tokens[number, :end] = torch.tensor(prompt + response)
        mask[number, len(prompt) : end] = True
        logp[number, len(prompt) : end] = torch.tensor(own)
    return TrainBatch(tokens, lengths, mask, logp, logp, torch.linspace(-1, 1, len(rows)))


def gap(policy: Policy, rows: list[Row]) -> torch.Tensor:
    """|delta| of every response token."""
    batch = batch_of(rows)
    scores = policy.score(batch.tokens, batch.lengths, batch.loss_mask, TEMPERATURE)
    return (scores.logp.cpu() - batch.sampler_logp)[batch.loss_mask].abs()


def test_responses_do_not_depend_on_the_way_in_which_they_are_computed(saved: Saved) -> None:
    """Tokens and log-probabilities of every response, bit for bit."""
    first = saved["32 together"]
    assert len(first) == PROMPTS and all(len(response) == TOKENS for _, response, _ in first)
    assert len({tuple(response) for _, response, _ in first}) == PROMPTS
    for way, (_, count) in WAYS.items():
        assert saved[way] == first[:count], way
    seen = {way: saved["seen", way] for way in WAYS}
    assert {way for way in WAYS if seen[way]["preemptions"]} == {way for way in WAYS if "preempted" in way}
    cached = {
        way for way, (changes, count) in WAYS.items() if count > 1 and changes.get("prefix_caching", True)
    }
    assert {way for way in WAYS if seen[way]["cache hits"]} == cached
    assert saved["scored"] == [logp for _, _, logp in first[:8]]


@pytest.mark.parametrize("tokens", [200, 1000, 8192])
def test_the_gap_is_zero_however_the_learner_cuts_its_batch(
    tokens: int, place: Path, saved: Saved, device: str
) -> None:
    policy = learner(place, micro_batch_tokens=tokens, logits_bytes=4 * VOCAB * tokens // 3, device=device)
    found = gap(policy, saved["32 together"])
    assert len(found) == PROMPTS * TOKENS and found.max() == 0.0
    assert gap(policy, saved["32 together"][5:6]).max() == 0.0


def test_the_gap_is_zero_where_every_response_is_decoded_alone(
    place: Path, saved: Saved, device: str
) -> None:
    """One prompt after the other, none of them cut and none in a cache."""
    rows = saved["one_layer"]
    found = gap(learner(place, "one_layer", device=device), rows)
    assert len(found) == ALONE * TOKENS and found.max() == 0.0
    assert len({tuple(response) for _, response, _ in rows}) == ALONE
    assert saved["seen", "one_layer"] == {"preemptions": 0, "cache hits": 0}


def test_the_gap_is_zero_in_bf16_and_with_tied_embeddings(place: Path, saved: Saved, device: str) -> None:
    found = gap(learner(place, "mixtral", dtype="bfloat16", device=device), saved["mixtral"])
    assert len(found) == 4 * TOKENS and found.max() == 0.0


@pytest.mark.parametrize("field", [f"model.{name}" for name in ModelSpec.types()] + ["weight.outer_domain"])
def test_a_field_of_one_side_opens_the_gap(field: str, place: Path, saved: Saved, device: str) -> None:
    """And the precision maps' difference names it."""
    strict = named_spec("strict")
    part: Specification = getattr(strict, field.partition(".")[0])
    name = field.partition(".")[2]
    other = next(value for value in ("library", "bf16", "expert") if value in list(type(part).types()[name]))
    changed = named_spec("strict", {field: other})
    assert gap(learner(place, spec=changed, device=device), saved["32 together"][:16]).max() > 0
    table = PrecisionMap.resolve(LAYERS, strict).diff(PrecisionMap.resolve(LAYERS, changed))
    assert [line.split()[0] for line in table.splitlines()[2:]] == [field]


def test_engines_that_run_can_be_put_under_another_field(place: Path, saved: Saved, device: str) -> None:
    responses = saved["32 together"][:8]
    rows = [(*row[:2], logp) for row, logp in zip(responses, saved["under another spec"], strict=True)]
    policy = learner(place, device=device)
    assert gap(policy, rows).max() > 0
    policy.model.compute_under(PrecisionMap.resolve(LAYERS, named_spec("strict", OTHER)))
    assert gap(policy, rows).max() == 0.0
    policy.model.compute_under(PrecisionMap.resolve(LAYERS, named_spec("strict")))
    assert gap(policy, responses).max() == 0.0
    with pytest.raises(ValueError, match="stays strict"):
        policy.model.compute_under(PrecisionMap.resolve(LAYERS, named_spec("minite")))


def test_the_first_mini_batch_is_exactly_on_policy(place: Path, saved: Saved, device: str) -> None:
    """Scoring passes, training passes and the sampler: the ratio is 1 at every token, until the first step."""
    policy = learner(place, micro_batch_tokens=500, device=device)
    batch = batch_of(saved["32 together"])
    metrics = policy.update(batch, ObjectiveConfig(), TEMPERATURE)
    assert metrics["log_ratio_abs"] == 0.0 and metrics["ratio_mean"] == 1.0 and metrics["grad_norm"] > 0
    assert policy.update(batch, ObjectiveConfig(), TEMPERATURE)["log_ratio_abs"] > 0


def test_gradients_are_close_to_those_of_the_same_experts_without_the_strict_model(place: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (4, 30), generator=generator)
    lengths = torch.tensor([30, 7, 22, 15])
    mask = (torch.arange(30) < lengths[:, None]) & (torch.arange(30) > 0)
    found = {}
    for spec in ("strict", "minite"):
        policy = learner(place, spec=named_spec(spec), micro_batch_tokens=40, grad_clip=0.0)
        packing = Packing.of(lengths)
        states = policy.model.hidden_states(packing.pack(tokens), packing)[packing.before(mask)]
        (-policy._token_scores(states, tokens, mask, 1.0, 1.0).logp.sum()).backward()
        found[spec] = {name: p.grad for name, p in policy.model.named_parameters()}
    assert found["strict"].keys() == found["minite"].keys()
    for name, usual in found["minite"].items():
        assert usual is not None and usual.norm() > 0, name
        assert (found["strict"][name] - usual).norm() < 0.05 * usual.norm(), name

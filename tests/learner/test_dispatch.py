"""Rows of tokens that go to the ranks of their experts packed, or as they are: the same bits."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import pytest
import torch

from kernels.catalogue import named_spec
from kernels.packed_rows import record_size
from kernels.reference import pack_rows
from learner.dispatch import expert_parallel
from tests.learner import dispatches as ranks
from tests.learner.conftest import MakeFolder
from tests.learner.layouts import VOCAB
from tests.learner.test_gpu_layouts import MODEL
from tests.learner.test_layouts import free_ports

pytestmark = pytest.mark.slow
GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
WAYS = ("packed", "as it is")
Outcome = tuple[str, list[dict[Any, Any]]]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=GPUS)])
def outcome(
    request: pytest.FixtureRequest, model_folder: MakeFolder, tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    """The device, and what two processes found; see `dispatches.run`."""
    device, out = request.param, tmp_path_factory.mktemp("dispatch")
    changes = MODEL if device == "cuda" else {"vocab_size": VOCAB}
    processes_of = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
    if device == "cpu":
        processes_of.set_forkserver_preload(["tests.learner.dispatches"])
    arguments = (free_ports(ranks.PORTS), model_folder("qwen3_moe", **changes), out, device)
    processes = [processes_of.Process(target=ranks.run, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=240)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return device, [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("first", ranks.TOKENS_OF_FIRST)
@pytest.mark.parametrize("name", ranks.LAYER_SPECS["cpu"])
def test_the_layer_is_that_of_one_process(outcome: Outcome, name: str, first: int) -> None:
    """Both ways, with a rank that has no tokens, too."""
    device, found = outcome
    if name not in ranks.LAYER_SPECS[device]:
        pytest.skip(f"not on {device}")
    expected = ranks.whole_layer(name, device)
    for way in WAYS:
        output = torch.cat([own[name, first][way]["output"] for own in found])
        assert torch.equal(output, expected), way
        assert not any(own[name, first][way]["message"] for own in found)


@pytest.mark.parametrize("first", ranks.TOKENS_OF_FIRST)
def test_the_gradient_comes_back(outcome: Outcome, first: int) -> None:
    found = [own["gradient", first] for own in outcome[1]]
    for part, expected in ranks.whole_input_gradient().items():
        torch.testing.assert_close(torch.cat([own[part] for own in found]), expected, rtol=1e-4, atol=1e-5)


def test_a_row_goes_once_to_each_rank_that_needs_it(outcome: Outcome) -> None:
    """Bytes: records or BF16 rows, one for each (token, rank); 16 bytes for each slot, and FC2's row back in BF16."""
    _, found = outcome
    given, half, hidden = ranks.layer_inputs(), ranks.SHAPE.experts // 2, ranks.SHAPE.hidden
    owners = given.topk_ids // half
    once = sum(int((owners == rank).any(1).sum()) for rank in range(2))
    slots = owners.numel()
    assert once < 0.7 * slots
    for way, row in (("packed", record_size(hidden)), ("as it is", 2 * hidden)):
        moved = sum(own["minite", 10][way]["moved"].bytes for own in found)
        assert moved == once * row + slots * (16 + 2 * hidden)


def test_a_row_that_is_not_finite_is_reported_by_the_owner_of_its_experts(outcome: Outcome) -> None:
    _, found = outcome
    ids = ranks.layer_inputs().topk_ids
    for rank, own in enumerate(found):
        messages = {own["not finite"][way]["message"] for way in WAYS}
        experts = sorted(e for token in (4, 20) for e in ids[token].tolist() if e // 4 == rank)
        assert experts and len(messages) == 1
        message = messages.pop()
        for expert in experts:
            assert f"{expert} ({experts.count(expert)} rows)" in message
        assert "layer 5: FC1 input of expert" in message


def test_packed_rows_are_refused_where_a_gradient_is_needed() -> None:
    given, spec = ranks.layer_inputs(), named_spec("minite")
    inputs = (given.x, given.topk_ids, given.topk_weights)
    with pytest.raises(ValueError, match="packed rows have no gradient"):
        expert_parallel(*inputs, None, 8, spec, None, partial(pack_rows, spec=spec))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "dtype"), ranks.POLICY_CASES)
def test_log_probabilities_have_the_same_bits(outcome: Outcome, name: str, dtype: str) -> None:
    device, found = outcome
    if device == "cuda" and (name, dtype) not in ranks.GPU_CASES:
        pytest.skip(f"not on {device}")
    for own in found:
        scores, moved = own[name, dtype]["scores"], own[name, dtype]["moved"]
        assert scores["packed"].any()
        assert torch.equal(scores["packed"], scores["as it is"])
        # Records in passes without a gradient alone, and under specs alone whose rows stand for themselves.
        packs = name != "te_exact"
        assert (torch.uint8 in moved["packed"].rows) is packs
        assert torch.uint8 not in moved["as it is"].rows | moved["training"].rows
        assert (moved["packed"].bytes < moved["as it is"].bytes) is packs

"""Two and four processes that share a model against one: loss, gradient, step, scores, checkpoints, export."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.checkpoint import read_weights
from learner.families.registry import family_of
from learner.folders import read_config
from learner.layout import Layout
from learner.mapping import parameter_shapes
from learner.policy import Policy
from learner.ranks import share
from tests.learner import layouts as ranks
from tests.learner.conftest import MakeFolder, config, precision_map

pytestmark = pytest.mark.slow
NAMES = list(ranks.LAYOUTS)
PAIRED = [
    (name, case)
    for name in NAMES
    for case in [*ranks.CASES_OF[name], "critic", *(["replayed"] if name in ranks.PAIRS else [])]
]


@pytest.fixture(scope="module")
def folders(model_folder: MakeFolder) -> ranks.Folders:
    return {
        tied: model_folder("qwen3_moe", vocab_size=ranks.VOCAB, tie_word_embeddings=tied)
        for tied in (False, True)
    }


@pytest.fixture(scope="module")
def alone(folders: ranks.Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process makes of it all."""
    saved = tmp_path_factory.mktemp("alone") / "checkpoint"
    results: dict[str, Any] = {
        case: ranks.steps_of(folders, case, {}, saved if case == "everything" else None)
        for case in ranks.CASES
    }
    results["resumed"] = {part: results["everything"][part] for part in ("last", "weights")}
    results["critic"] = ranks.critic_of(folders, {})
    results["replayed"] = ranks.replayed(folders, {})
    return results | {"saved": saved}


@pytest.fixture(scope="module")
def out(folders: ranks.Folders, alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four processes left behind; see `layouts.run_process`."""
    out = tmp_path_factory.mktemp("ranks")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.learner.layouts"])  # imported once for all four
    common = (free_ports(len(NAMES)), folders, out, alone["saved"])
    processes = [forks.Process(target=ranks.run_process, args=(number, *common)) for number in range(4)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=240)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * 4
    return out


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
    finally:
        for free in sockets:
            free.close()


def by_rank(out: Path, name: str) -> list[dict[str, Any]]:
    count = Layout.of(config(**ranks.LAYOUTS[name])).ranks
    return [torch.load(out / f"{name}.rank{rank}.pt") for rank in range(count)]


def put_together(blocks: list[dict[str, Any]], like: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tensors from what each rank holds; ranks that hold the same must hold the same bits."""
    whole = {name: torch.full_like(tensor, torch.nan) for name, (_, tensor) in like.items()}
    for own in blocks:
        for name, (start, block) in own.items():
            place = whole[name][tuple(slice(a, a + n) for a, n in zip(start, block.shape, strict=True))]
            assert place.isnan().all() or torch.equal(place, block), name
            place.copy_(block)
    return whole


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, Any], relative: float) -> None:
    """In the L2 norm of each tensor."""
    assert found.keys() == expected.keys()
    for name, (_, value) in expected.items():
        assert (found[name] - value).norm() <= relative * value.norm(), name


@pytest.mark.parametrize(("name", "case"), PAIRED)
def test_loss_gradient_and_step_are_those_of_one_process(
    out: Path, alone: dict[str, Any], name: str, case: str
) -> None:
    """Up to the rounding of FP32 sums, which a quantised layer's gradient has as one of BF16 here and there, and which
    reaches a BF16 model's weights as that."""
    results, single = [found[case] for found in by_rank(out, name)], alone[case]
    _, spec, dtype, *_ = ranks.CASES.get(case, ("", "fp32", "float32"))
    exact = spec == "fp32"
    relative = 1e-5 if exact else 1e-2 if dtype == "bfloat16" else 1e-3
    assert all(found["metrics"] == results[0]["metrics"] for found in results)
    assert single["metrics"]["grad_norm"] > 0.05  # clipped
    assert results[0]["metrics"]["tokens"] == single["metrics"]["tokens"]
    assert results[0]["metrics"]["loss"] == pytest.approx(single["metrics"]["loss"], abs=2e-6)
    assert results[0]["metrics"] == pytest.approx(single["metrics"], rel=relative, abs=2e-6)
    assert_close(
        put_together([found["gradient"] for found in results], single["gradient"]),
        single["gradient"],
        relative,
    )
    if exact and "last" in single:
        assert results[0]["last"] == pytest.approx(single["last"], rel=1e-5, abs=2e-6)
    if "weights" in single:
        whole = put_together([found["weights"] for found in results], single["weights"])
        assert_close(whole, single["weights"], relative)


@pytest.mark.parametrize(("name", "case"), PAIRED)
def test_scores_are_those_of_one_process(out: Path, alone: dict[str, Any], name: str, case: str) -> None:
    single = alone[case].get("scores") or {"values": alone[case]["values"]}
    for found in by_rank(out, name):
        scores = found[case].get("scores") or {"values": found[case]["values"]}
        assert scores.keys() == single.keys()
        for part, value in single.items():
            near = 0.0 if case == "strict" else 3e-2 if case == "bfloat16" else 1e-5
            torch.testing.assert_close(scores[part], value, rtol=near, atol=near, msg=part)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_another_layout_is_gone_on_from(
    out: Path, alone: dict[str, Any], folders: ranks.Folders, name: str
) -> None:
    """By this layout from that of another, and by one process from that of this."""
    single = alone["resumed"]
    results = [found["resumed"] for found in by_rank(out, name)]
    assert results[0]["last"] == pytest.approx(single["last"], rel=1e-5, abs=2e-6)
    whole = put_together([found["weights"] for found in results], single["weights"])
    assert_close(whole, single["weights"], 1e-5)
    again = ranks.resumed(folders, "everything", {}, out / name)
    assert again["last"] == pytest.approx(single["last"], rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_layout_goes_on_bit_for_bit(out: Path, name: str) -> None:
    for found in by_rank(out, name):
        whole, again = found["everything"], found["again"]
        assert again["last"] == whole["last"]
        assert all(torch.equal(again["weights"][key][1], own) for key, (_, own) in whole["weights"].items())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_holds_every_weight_once(
    out: Path, alone: dict[str, Any], folders: ranks.Folders, name: str
) -> None:
    config = read_config(folders[True])
    shapes = parameter_shapes(family_of(config).read(config))
    del shapes["output_layer.weight"]  # tied
    stored = read_weights(out / name)
    assert {name: tensor.shape for name, tensor in stored.items()} == shapes
    for name, tensor in read_weights(alone["saved"]).items():
        torch.testing.assert_close(stored[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_that_lost_a_file_is_refused(out: Path, folders: ranks.Folders) -> None:
    lost = next((out / "pp2").glob("optimizer-00001*"))
    lost.rename(lost.with_suffix(".gone"))
    try:
        policy = ranks.policy_of(folders, "everything", {})
        with pytest.raises(FileNotFoundError, match=r"is not whole: optimizer-00001-of-00002"):
            policy.restore(out / "pp2")
        assert policy.steps == 0
    finally:
        lost.with_suffix(".gone").rename(lost)


@pytest.mark.parametrize("name", NAMES)
def test_rank_0_exports_what_one_process_would(out: Path, folders: ranks.Folders, name: str) -> None:
    """Bit for bit what one process exports that holds the weights which the ranks hold."""
    for case in ranks.CASES_OF[name]:
        results = [found[case] for found in by_rank(out, name)]
        policy = ranks.policy_of(folders, case, {})
        whole = put_together([found["weights"] for found in results], ranks.weights(policy))
        with torch.no_grad():
            for key, parameter in policy.model.named_parameters():
                parameter.copy_(whole[key])
        expected = {key: ranks.tensor_digest(tensor) for key, tensor in ranks.exported(policy)}
        assert results[0]["export"] == expected
        assert not any(found["export"] for found in results[1:])


@pytest.mark.parametrize("name", NAMES)
def test_an_error_on_one_rank_stops_all(out: Path, name: str) -> None:
    raised = [found["failing"] for found in by_rank(out, name)]
    for rank, message in enumerate(raised):
        if rank == 1:
            assert message.startswith("FloatingPointError:") and "values of old_logp" in message
        else:
            assert message == f"OtherRankFailed: 1 of {len(raised)} ranks failed; no weight was changed"


def test_the_cases_are_not_trivial(alone: dict[str, Any]) -> None:
    """A mean of the ranks' own means would be another loss; ranks have different numbers of micro-batches."""
    batch = ranks.make_batch()
    shares = [batch.select(torch.arange(rank, 7, 2)) for rank in range(2)]
    assert len({part.totals.tokens for part in shares}) == len({part.totals.rows for part in shares}) == 2
    assert len({alone[case]["metrics"]["loss"] for case in ("token_mean", "everything", "dr_grpo")}) == 3
    assert alone["everything"]["scores"]["outside_nucleus"].any()
    passes = [share(batch.lengths, 30, rank, 2, lockstep=True) for rank in range(2)]
    assert len(passes[0]) == len(passes[1]) and any(one.idle for own in passes for one in own)


def test_shares_hold_every_row_once() -> None:
    lengths = ranks.make_batch().lengths
    for lockstep in (False, True):
        passes = [one for rank in range(3) for one in share(lengths, 30, rank, 3, lockstep)]
        rows = torch.cat([one.rows for one in passes if not one.idle])
        assert rows.sort().values.equal(torch.arange(7))
    with pytest.raises(ValueError, match="a batch of 7 sequences cannot be shared out over 8 ranks"):
        share(lengths, 30, 7, 8, lockstep=False)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3 does not divide the model's 2 key-value heads"),
        ({"pipeline_parallel": 3}, "pipeline_parallel=3 does not divide the model's 2 layers"),
        (
            {"data_parallel": 3, "expert_parallel": 3},
            "expert_parallel=3 does not divide the model's 4 experts",
        ),
        ({"data_parallel": 2}, "data_parallel=2 needs 2 processes, found a process group of 1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(
    model_folder: MakeFolder, layout: dict[str, int], problem: str
) -> None:
    Policy(model_folder("mixtral"), precision_map("fp32"), config(), seed=0)  # has a process group
    with pytest.raises(ValueError, match=problem):
        Policy(model_folder("mixtral"), precision_map("fp32"), config(**layout), seed=0)
    with pytest.raises(ValueError, match=r"a strict spec .* tensor_parallel=2"):
        Policy(model_folder("mixtral"), precision_map("strict"), config(tensor_parallel=2), seed=0)


def test_the_shapes_are_those_of_the_model(folders: ranks.Folders) -> None:
    for folder in (*folders.values(),):
        policy = Policy(folder, precision_map("fp32"), config(), seed=0)
        shapes = parameter_shapes(policy.architecture)
        found = {name: parameter.shape for name, parameter in policy.model.named_parameters()}
        assert found == {name: shapes[name] for name in found}

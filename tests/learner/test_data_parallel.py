"""Two processes on this machine (gloo, loopback interface) against one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.batch import TrainBatch
from learner.config import CorrectionConfig, CriticConfig, ObjectiveConfig
from learner.critic import Critic
from learner.data_parallel import share
from learner.policy import Policy
from tests.learner.conftest import VOCAB, MakeFolder, config, precision_map
from tests.learner.test_policy import EVERYTHING, OBJECTIVE, gradients, weights

RANKS = 2
OBJECTIVES = {
    "token_mean": OBJECTIVE,
    "everything": EVERYTHING,  # sequence_mean, correction and rejection of whole sequences, KL, entropy
    "dr_grpo": ObjectiveConfig(
        loss_aggregation="dr_grpo",
        max_response_tokens=10,
        correction=CorrectionConfig(weight="sequence", cap=1.5),
    ),
}
# case -> (objective, spec, dtype)
CASES = {
    "token_mean": ("token_mean", "fp32", "float32"),
    "everything": ("everything", "fp32", "float32"),
    "dr_grpo": ("dr_grpo", "fp32", "float32"),
    "minite": ("everything", "minite", "float32"),
    "bfloat16": ("everything", "minite", "bfloat16"),
}
STEPS = 3


def make_batch() -> TrainBatch:
    """Seven responses of 0 to 10 tokens, so that ranks differ in rows, tokens and sequences in the loss; those of rank
    1 alone are weighed down or rejected.
    """
    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([12, 5, 9, 12, 3, 7, 11])
    tokens = torch.randint(0, VOCAB, (7, 12), generator=generator)
    positions = torch.arange(12)
    mask = (positions >= 2) & (positions < lengths[:, None])
    mask[4] = False
    noise = [0.3 * torch.randn(mask.shape, generator=generator) for _ in range(3)]
    old = -4 + noise[0]
    sampler = old + noise[1] + 0.5 * (torch.arange(7) % 2).unsqueeze(1)
    advantages = torch.randn(7, generator=generator)
    returns = advantages.unsqueeze(1).expand_as(mask).contiguous()
    return TrainBatch(
        tokens,
        lengths,
        mask,
        sampler,
        old,
        advantages,
        reference_logp=old + noise[2],
        old_values=0.2 * noise[0],
        returns=returns,
    )


def settings(ranks: int, dtype: str = "float32") -> Any:
    """Gradients are clipped; a large eps keeps AdamW from blowing the rounding of small gradients up."""
    return config(data_parallel=ranks, grad_clip=0.05, eps=1e-2, micro_batch_tokens=30, dtype=dtype)


def steps_of(folder: Path, case: str, batch: TrainBatch, ranks: int) -> dict[str, Any]:
    """Metrics and gradient of the first of three updates, and the weights after the last."""
    name, spec, dtype = CASES[case]
    policy = Policy(folder, precision_map(spec), settings(ranks, dtype), seed=0)
    metrics, gradient = gradients(policy, batch, OBJECTIVES[name])
    for _ in range(STEPS - 1):
        policy.update(batch, OBJECTIVES[name], 1.0)
    return {"metrics": metrics, "gradient": gradient, "weights": weights(policy)}


def critic_steps_of(folder: Path, batch: TrainBatch, ranks: int) -> dict[str, Any]:
    critic = Critic(folder, precision_map("fp32"), settings(ranks), CriticConfig(), seed=0)
    metrics = [critic.update(batch) for _ in range(STEPS)]
    return {"metrics": metrics[-1], "gradient": {}, "weights": weights(critic)}


def failing_step(folder: Path, batch: TrainBatch, rank: int) -> str:
    """What is raised on each rank when an input of rank 1 is not finite; no weight may change."""
    policy = Policy(folder, precision_map("fp32"), settings(RANKS), seed=0)
    before = weights(policy)
    if rank == 1:
        batch.old_logp[batch.loss_mask] = float("nan")
    try:
        policy.update(batch, OBJECTIVE, 1.0)
    except (FloatingPointError, RuntimeError) as error:
        assert all(torch.equal(w, before[name]) for name, w in weights(policy).items())
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run_rank(folder: Path, out: Path) -> None:
    """What each of the processes does."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    own = share(make_batch(), rank, RANKS)
    results = {case: steps_of(folder, case, own, RANKS) for case in CASES}
    results["critic"] = critic_steps_of(folder, own, RANKS)
    results["failure"] = {"raised": failing_step(folder, own, rank)}
    torch.save(results, out / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def by_rank(model_folder: MakeFolder, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import sys; from pathlib import Path; from tests.learner import test_data_parallel as t;"
        " t.run_rank(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(model_folder("qwen3_moe")), str(out)],
            env=os.environ | common | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(errors)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone(model_folder: MakeFolder) -> dict[str, Any]:
    folder = model_folder("qwen3_moe")
    results = {case: steps_of(folder, case, make_batch(), ranks=1) for case in CASES}
    return results | {"critic": critic_steps_of(folder, make_batch(), ranks=1)}


@pytest.mark.parametrize("case", [*CASES, "critic"])
def test_both_ranks_hold_the_same_bits(by_rank: list[dict[str, Any]], case: str) -> None:
    first, second = (results[case] for results in by_rank)
    assert first["metrics"] == second["metrics"]
    for part in ("gradient", "weights"):
        assert first[part].keys() == second[part].keys()
        assert all(torch.equal(tensor, second[part][name]) for name, tensor in first[part].items())


@pytest.mark.parametrize("case", [*CASES, "critic"])
def test_loss_gradient_and_step_are_those_of_one_rank(
    by_rank: list[dict[str, Any]], alone: dict[str, Any], case: str
) -> None:
    """Up to the rounding of FP32 sums, which in a BF16 model reaches its weights as one rounding of BF16."""
    shared, single = by_rank[0][case], alone[case]
    bf16 = CASES.get(case, ("", "", ""))[2] == "bfloat16"
    assert single["metrics"]["grad_norm"] > 0.05  # clipped
    assert shared["metrics"]["tokens"] == single["metrics"]["tokens"]
    assert shared["metrics"]["loss"] == pytest.approx(single["metrics"]["loss"], abs=1e-6)
    assert shared["metrics"] == pytest.approx(single["metrics"], rel=1e-2 if bf16 else 1e-5, abs=1e-6)
    for name, gradient in single["gradient"].items():
        difference = (shared["gradient"][name] - gradient).norm()
        assert difference <= (1e-2 if bf16 else 1e-5) * gradient.norm(), name
    for name, weight in single["weights"].items():
        torch.testing.assert_close(
            shared["weights"][name], weight, rtol=8e-3 if bf16 else 1e-5, atol=1e-4 if bf16 else 1e-6
        )


def test_the_cases_are_not_trivial(alone: dict[str, Any]) -> None:
    """A mean of the ranks' own means would be another loss."""
    batch = make_batch()
    shares = [share(batch, rank, RANKS) for rank in range(RANKS)]
    assert len({part.totals.tokens for part in shares}) == len({part.totals.rows for part in shares}) == RANKS
    assert len({alone[case]["metrics"]["loss"] for case in ("token_mean", "everything", "dr_grpo")}) == 3


def test_an_error_on_one_rank_stops_all(by_rank: list[dict[str, Any]]) -> None:
    raised = [results["failure"]["raised"] for results in by_rank]
    assert raised[0] == "RuntimeError: 1 of 2 data-parallel ranks failed; no weight was changed"
    assert raised[1].startswith("FloatingPointError:") and "values of old_logp" in raised[1]


def test_shares_hold_every_row_once() -> None:
    batch = make_batch()
    parts = [share(batch, rank, 3) for rank in range(3)]
    assert torch.cat([part.advantages for part in parts]).sort().values.equal(batch.advantages.sort().values)
    assert [len(part.tokens) for part in parts] == [3, 2, 2]
    with pytest.raises(ValueError, match="rank 7 of 8 has no row in a batch of 7 sequences"):
        share(batch, 7, 8)


def test_more_ranks_than_processes_are_refused(model_folder: MakeFolder) -> None:
    Policy(model_folder("mixtral"), precision_map("fp32"), config(), seed=0)
    with pytest.raises(ValueError, match=r"data_parallel=2, found a process group of 1"):
        Policy(model_folder("mixtral"), precision_map("fp32"), config(data_parallel=2), seed=0)

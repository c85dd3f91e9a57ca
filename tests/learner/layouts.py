"""What each of several processes does that share a model, on this machine: on a CPU over gloo and the loopback
interface, on GPUs over NCCL, each process with one of its own.
"""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernels.catalogue import named_spec
from kernels.digest import tensor_digest
from kernels.precision_map import PrecisionMap
from learner.batch import TrainBatch
from learner.config import CorrectionConfig, CriticConfig, KLConfig, LearnerConfig, ObjectiveConfig
from learner.critic import Critic
from learner.folders import read_config
from learner.megatron_api import parallel_state
from learner.policy import Policy
from learner.trainable import Trainable
from tests.learner.conftest import precision_map

VOCAB = 64
PAIRS = {  # of two processes each
    "dp2": {"data_parallel": 2},
    "ep2": {"data_parallel": 2, "expert_parallel": 2},
    "tp2": {"tensor_parallel": 2},
    "tp2_ep2": {"tensor_parallel": 2, "expert_parallel": 2, "recompute": True},
    "pp2": {"pipeline_parallel": 2},
}
FOURS = {
    "tp2_dp2_ep2": {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": 2},
    "tp2_pp2_ep2": {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = PAIRS | FOURS
OBJECTIVES = {
    "token_mean": ObjectiveConfig(entropy_coefficient=0.1),
    # Every term, and statistics of whole sequences.
    "everything": ObjectiveConfig(
        dual_clip=1.5,
        loss_aggregation="sequence_mean",
        entropy_coefficient=0.1,
        correction=CorrectionConfig(weight="sequence", sequence_band=(0.7, 1.4)),
        kl=KLConfig(coefficient=0.2),
    ),
    "dr_grpo": ObjectiveConfig(
        loss_aggregation="dr_grpo",
        max_response_tokens=10,
        correction=CorrectionConfig(weight="sequence", cap=1.5),
    ),
}
# case -> (objective, spec, dtype, tied embeddings, top-p)
CASES = {
    "token_mean": ("token_mean", "fp32", "float32", False, 1.0),
    "everything": ("everything", "fp32", "float32", True, 0.9),
    "dr_grpo": ("dr_grpo", "fp32", "float32", False, 1.0),
    "minite": ("everything", "minite", "float32", False, 1.0),
    "bfloat16": ("everything", "minite", "bfloat16", False, 1.0),
    "strict": ("token_mean", "strict", "float32", False, 1.0),
}
# A product that is cut or summed otherwise flips roundings to 4 bits, so that quantised cases are compared where the
# products are the same.
CASES_OF = {
    "dp2": list(CASES),
    "ep2": ["everything", "minite", "strict"],
    "tp2": ["everything", "token_mean"],
    "pp2": ["everything", "strict"],
    **{name: ["everything"] for name in ("tp2_ep2", *FOURS)},
}
# With 12 tokens a micro-batch one process and two replicas cut `make_batch` into the same micro-batches.
GPU_ONLY = {"same_products": ("everything", "minite", "bfloat16", False, 1.0)}
ALL_CASES = CASES | GPU_ONLY
MICRO_BATCH_TOKENS = {"same_products": 12}
GPU_CASES = {name: ["everything", "same_products"] for name in PAIRS}
GPU_CASES["tp2"].append("token_mean")
Folders = dict[bool, Path]  # of the model, with tied embeddings or without


def make_batch() -> TrainBatch:
    """Seven responses of 0 to 10 tokens, so that ranks differ in rows, tokens and sequences in the loss; those of rank
    1 of 2 alone are weighed down or rejected.
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


def settings(
    layout: dict[str, Any], dtype: str = "float32", device: str = "cpu", micro_batch_tokens: int = 30
) -> LearnerConfig:
    """Gradients are clipped; a large eps keeps AdamW from blowing the rounding of small gradients up."""
    common = {"lr": 1e-3, "grad_clip": 0.05, "eps": 1e-2, "weight_decay": 0.1}
    own = {"micro_batch_tokens": micro_batch_tokens, "dtype": dtype, "device": device}
    return LearnerConfig(**common, **own, **layout)


def blocks(trainable: Trainable, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What this process holds, on the CPU, by parameters' names in the whole model, with where it belongs."""
    place, found = trainable.ranks.place, {}
    for name, value in values.items():
        whole_name = place.global_name(name, trainable.architecture)
        found[whole_name] = (place.box(whole_name, tuple(value.shape)).start, value.cpu())
    return found


def weights(trainable: Trainable) -> dict[str, Any]:
    return blocks(trainable, {name: p.detach().clone() for name, p in trainable.model.named_parameters()})


def recorded(trainable: Trainable, update: Callable[[], dict[str, float]]) -> tuple[dict[str, float], Any]:
    """Metrics of an update, and the gradient that reached the optimiser."""
    optimizer, found = trainable.optimizer, {}
    step = optimizer.step

    def record(lr: float | None = None) -> tuple[float, float]:
        masters = optimizer.masters.items()
        found.update({name: optimizer.whole(name, master.grad).clone() for name, master in masters})
        return step(lr)

    optimizer.step = record
    try:
        return update(), blocks(trainable, found)
    finally:
        del optimizer.step


def policy_of(folders: Folders, case: str, layout: dict[str, Any], device: str = "cpu") -> Policy:
    _, spec, dtype, tied, _ = ALL_CASES[case]
    layers = read_config(folders[tied]).num_hidden_layers
    own_map = PrecisionMap.resolve(layers, named_spec(spec))
    config = settings(layout, dtype, device, MICRO_BATCH_TOKENS.get(case, 30))
    return Policy(folders[tied], own_map, config, seed=0)


def steps_of(
    folders: Folders, case: str, layout: dict[str, Any], out: Path | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Scores; metrics and gradient of the first of two updates; what is exported, and the weights, after the second.

    Where `out` is given, a checkpoint of the time between them is left there.
    """
    objective, top_p = OBJECTIVES[ALL_CASES[case][0]], ALL_CASES[case][4]
    policy, batch = policy_of(folders, case, layout, device), make_batch()
    scores = policy.score(batch.tokens, batch.lengths, batch.loss_mask, 0.8, top_p, return_routes=True)
    metrics, gradient = recorded(policy, lambda: policy.update(batch, objective, 1.0, top_p))
    if out is not None:
        policy.checkpoint(out)
    last = policy.update(batch, objective, 1.0, top_p)
    return {
        "scores": vars(scores),
        "metrics": metrics,
        "last": last,
        "gradient": gradient,
        "weights": weights(policy),
        "export": {name: tensor_digest(t) for name, t in exported(policy) if t.numel()},
    }


def exported(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    yield from policy.export()
    yield from policy.export_derived()
    for name, tensor in policy.export_operands():
        yield f"operand {name}", tensor


def resumed(
    folders: Folders, case: str, layout: dict[str, Any], saved: Path, device: str = "cpu"
) -> dict[str, Any]:
    """The second update, from a checkpoint of another layout."""
    policy = policy_of(folders, case, layout, device)
    policy.restore(saved)
    last = policy.update(make_batch(), OBJECTIVES[CASES[case][0]], 1.0, CASES[case][4])
    return {"last": last, "weights": weights(policy)}


def critic_of(folders: Folders, layout: dict[str, Any]) -> dict[str, Any]:
    critic, batch = (
        Critic(folders[True], precision_map("fp32"), settings(layout), CriticConfig(), 0),
        make_batch(),
    )
    critic.update(batch)  # before which every value is 0
    metrics, gradient = recorded(critic, lambda: critic.update(batch))
    values = critic.values(batch.tokens, batch.lengths, batch.loss_mask)
    return {"metrics": metrics, "gradient": gradient, "weights": weights(critic), "values": values}


def replayed(folders: Folders, layout: dict[str, Any]) -> dict[str, Any]:
    """An update in which every token takes the experts after those that its routers would choose."""
    policy, batch = policy_of(folders, "token_mean", layout), make_batch()
    parts = (batch.tokens, batch.lengths, batch.loss_mask)
    own = policy.score(*parts, 1.0, return_routes=True).routes
    routes = torch.where(own < 0, own, (own + 1) % policy.architecture.experts)
    scores = policy.score(*parts, 1.0, routes=routes)
    batch = TrainBatch(**{**vars(batch), "routes": routes})
    metrics, gradient = recorded(policy, lambda: policy.update(batch, OBJECTIVES["token_mean"], 1.0))
    return {"scores": {"logp": scores.logp}, "metrics": metrics, "gradient": gradient}


def failing(folders: Folders, layout: dict[str, Any], rank: int) -> str:
    """What is raised on each rank when an input of rank 1 is not finite; no weight may change."""
    policy, batch = policy_of(folders, "token_mean", layout), make_batch()
    before = weights(policy)
    if rank == 1:
        batch.old_logp[batch.loss_mask] = float("nan")
    try:
        policy.update(batch, OBJECTIVES["token_mean"], 1.0)
    except (FloatingPointError, RuntimeError) as error:
        after = weights(policy)
        assert all(torch.equal(after[name][1], weight) for name, (_, weight) in before.items())
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def world(rank: int, ranks: int, port: int, device: str = "cpu") -> Iterator[None]:
    """The environment that torchrun would make, and nothing left of the process group afterwards."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def run_layout(name: str, rank: int, folders: Folders, out: Path, saved: Path) -> Path:
    """saved: a checkpoint of another layout. Returns that of this one."""
    layout = LAYOUTS[name]
    results: dict[str, Any] = {"resumed": resumed(folders, "everything", layout, saved)}
    for case in CASES_OF[name]:
        results[case] = steps_of(folders, case, layout, out / name if case == "everything" else None)
    results["again"] = resumed(folders, "everything", layout, out / name)
    results["critic"] = critic_of(folders, layout)
    if name in PAIRS:
        results["replayed"] = replayed(folders, layout)
    results["failing"] = failing(folders, layout, rank)
    torch.save(results, out / f"{name}.rank{rank}.pt")
    return out / name


def run_process(process: int, ports: Sequence[int], folders: Folders, out: Path, saved: Path) -> None:
    """Process number 0 to 3: pairs first, two at a time, then all four together."""
    torch.set_num_threads(1)
    pair, rank = divmod(process, 2)
    for number, name in enumerate(PAIRS):
        if number % 2 == pair:
            with world(rank, 2, ports[number]):
                saved = run_layout(name, rank, folders, out, saved)
    saved = out / next(iter(PAIRS))
    for port, name in zip(ports[len(PAIRS) :], FOURS, strict=True):
        with world(process, 4, port):
            saved = run_layout(name, process, folders, out, saved)


def run_on_gpus(rank: int, ports: Sequence[int], folders: Folders, out: Path, device: str = "cuda") -> None:
    """Process number 0 or 1: every pair in turn, each from the checkpoint of the one before. A case that fails leaves
    its error in the place of its results.
    """
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(60)  # says where a process hangs
    saved: Path | None = None
    for port, (name, layout) in zip(ports, PAIRS.items(), strict=True):
        with world(rank, 2, port, device):
            for case in GPU_CASES[name]:
                checkpoint = out / name if case == "everything" else None
                with _kept(out / f"{name}.{case}.rank{rank}.pt") as results:
                    results.update(steps_of(folders, case, layout, checkpoint, device))
            with _kept(out / f"{name}.resumed.rank{rank}.pt") as results:
                if saved is not None:
                    results.update(resumed(folders, "everything", layout, saved, device))
        saved = out / name
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def _kept(file: Path) -> Iterator[dict[str, Any]]:
    results: dict[str, Any] = {}
    try:
        yield results
    except Exception:
        results["error"] = traceback.format_exc()
    torch.save(results, file)

"""What each of two processes does that own half of the experts each: rows of tokens moved packed, and as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from kernels import backends
from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights
from kernels.guard import NonFiniteGuard
from kernels.labels import spec_from_label
from kernels.layer_input import LayerInput, LayerShape, synthetic_layer
from kernels.precision_map import PrecisionMap
from kernels.slots import slot_spec
from learner.config import ObjectiveConfig
from learner.dispatch import Exchange, expert_parallel
from learner.folders import read_config
from learner.moe import Experts
from learner.policy import Policy
from tests.learner.layouts import PAIRS, make_batch, settings, world

SHAPE = LayerShape(tokens=23, hidden=128, ffn=128, experts=8, top_k=3)
TOKENS_OF_FIRST = (23, 10, 0)  # of those of rank 0; rank 1 has the rest
LAYER_SPECS = {  # by device
    "cpu": ("minite", "minite_expert", "minite[router_position=swiglu_output]"),
    "cuda": ("minite", "minite_expert"),
}
# spec, type of the model's parameters
GPU_CASES = [("minite", "float32"), ("minite", "bfloat16"), ("minite_expert", "bfloat16")]
POLICY_CASES = [*GPU_CASES, ("te_exact", "bfloat16"), ("strict", "float32")]
PORTS = 2


@dataclass
class Moved:
    """What a rank sent to all, itself included: the types of rows, and bytes of all."""

    rows: set[torch.dtype] = field(default_factory=set)
    bytes: int = 0


@contextmanager
def watched() -> Iterator[Moved]:
    """What `Exchange.move` moves meanwhile. Rows of the hidden width or of bytes are rows; indices are int64."""
    moved, move = Moved(), Exchange.move

    def see(exchange: Exchange, rows: torch.Tensor) -> torch.Tensor:
        if rows.dim() == 2 and rows.dtype is not torch.int64:
            moved.rows.add(rows.dtype)
        moved.bytes += rows.numel() * rows.element_size()
        return move(exchange, rows)

    with patch.object(Exchange, "move", see):
        yield moved


def layer_inputs(not_finite: bool = False) -> LayerInput:
    given = synthetic_layer(SHAPE, "heavy", 3)
    if not_finite:
        given.x[4, 7], given.x[20, 100] = torch.nan, torch.inf
    return given


@torch.no_grad()
def layer(name: str, rank: int, first: int, device: str, not_finite: bool = False) -> dict[str, Any]:
    """By way: the output of this rank's tokens, what moved, and what the guard says of this rank's experts."""
    spec, given, half = spec_from_label(name), layer_inputs(not_finite), SHAPE.experts // 2
    tokens = slice(0, first) if rank == 0 else slice(first, SHAPE.tokens)
    own = slice(rank * half, (rank + 1) * half)
    slots = slot_spec(spec)
    kernels, collect = backends.choose(slots, device), backends.choose(spec, device).collect
    masters = given.w13[own].to(device), given.w2[own].to(device)
    prepared = kernels.prepare(kernels.quantize(*masters, spec).in_layout(kernels.layout), slots)
    inputs = [t[tokens].to(device) for t in (given.x, given.topk_ids, given.topk_weights)]
    results = {}
    for way, pack in (("packed", partial(kernels.pack_rows, spec=slots)), ("as it is", None)):
        guard = NonFiniteGuard(5, half, rank * half)

        def run(x: Any, ids: torch.Tensor, p: torch.Tensor, guard: NonFiniteGuard = guard) -> torch.Tensor:
            return kernels.forward(x, ids, p, prepared, slots, guard)

        with watched() as moved:
            output = expert_parallel(*inputs, run, half, spec, dist.group.WORLD, pack, collect)
        try:
            guard.check()
            message = ""
        except ValueError as error:
            message = str(error)
        results[way] = {"output": output.cpu(), "moved": moved, "message": message}
    return results


def input_gradient(rank: int, first: int, device: str) -> dict[str, torch.Tensor]:
    """Of this rank's tokens and coefficients, in FP32, by the experts' rows of all ranks."""
    spec, given, half = named_spec("fp32"), layer_inputs(), SHAPE.experts // 2
    tokens = slice(0, first) if rank == 0 else slice(first, SHAPE.tokens)
    masters = [w[rank * half : (rank + 1) * half].float().to(device) for w in (given.w13, given.w2)]
    slots = slot_spec(spec)
    kernels = backends.choose(slots, device)
    prepared = kernels.prepare(kernels.quantize(*masters, spec), slots)
    x, p = (t[tokens].float().to(device).requires_grad_() for t in (given.x, given.topk_weights))

    def run(rows: Any, ids: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        return kernels.expert_layer(rows, ids, coefficients, *masters, prepared, slots)

    ids = given.topk_ids[tokens].to(device)
    output = expert_parallel(x, ids, p, run, half, spec, dist.group.WORLD)
    d_x, d_p = torch.autograd.grad(output.square().sum(), (x, p))
    return {"x": d_x.cpu(), "p": d_p.cpu()}


def whole_input_gradient() -> dict[str, torch.Tensor]:
    """The same in one process."""
    spec, given = named_spec("fp32"), layer_inputs()
    masters = given.w13.float(), given.w2.float()
    prepared = backends.REFERENCE.prepare(backends.REFERENCE.quantize(*masters, spec), spec)
    x, p = (t.float().requires_grad_() for t in (given.x, given.topk_weights))
    output = backends.REFERENCE.expert_layer(x, given.topk_ids, p, *masters, prepared, spec)
    d_x, d_p = torch.autograd.grad(output.square().sum(), (x, p))
    return {"x": d_x, "p": d_p}


def whole_layer(name: str, device: str) -> torch.Tensor:
    """The same layer in one process."""
    spec, given = spec_from_label(name), layer_inputs()
    kernels = backends.choose(spec, device)
    weights = ExpertWeights.quantize(given.w13, given.w2, spec).tensors()
    on_device = ExpertWeights.from_tensors({key: t.to(device) for key, t in weights.items()}, spec)
    prepared = kernels.prepare(on_device.in_layout(kernels.layout), spec)
    inputs = (t.to(device) for t in (given.x, given.topk_ids, given.topk_weights))
    return kernels.forward(*inputs, prepared, spec).cpu()


def policy_scores(folder: Path, name: str, dtype: str, device: str) -> dict[str, Any]:
    """Log-probabilities in passes without gradient, packed where the spec allows it, and with that left out; what moved
    in each, and in an update.
    """
    own_map = PrecisionMap.resolve(read_config(folder).num_hidden_layers, named_spec(name))
    policy = Policy(folder, own_map, settings(PAIRS["ep2"], dtype, device), seed=0)
    batch = make_batch()
    parts = (batch.tokens, batch.lengths, batch.loss_mask, 0.8)
    with watched() as packed:
        first = policy.score(*parts)
    with watched() as plain, patch.object(Experts, "_pack", lambda experts: None):
        second = policy.score(*parts)
    with watched() as training:
        policy.update(batch, ObjectiveConfig(), 1.0)
    scores = {"packed": first.logp, "as it is": second.logp}
    return {"scores": scores, "moved": {"packed": packed, "as it is": plain, "training": training}}


def run(rank: int, ports: Sequence[int], folder: Path, out: Path, device: str) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with world(rank, 2, ports[0], device):
        for name in LAYER_SPECS[device]:
            for first in TOKENS_OF_FIRST:
                results[name, first] = layer(name, rank, first, device)
        for first in TOKENS_OF_FIRST:
            results["gradient", first] = input_gradient(rank, first, device)
        results["not finite"] = layer("minite", rank, 10, device, not_finite=True)
    with world(rank, 2, ports[1], device):
        for name, dtype in GPU_CASES if device == "cuda" else POLICY_CASES:
            results[name, dtype] = policy_scores(folder, name, dtype, device)
    torch.save(results, out / f"rank{rank}.pt")

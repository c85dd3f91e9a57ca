"""Experts shared out over GPUs: the layer with rows moved in BF16 and packed, its all-to-alls, and one GPU alone.

    NCCL_NVLS_ENABLE=0 PYTHONPATH=. python scripts/bench/dispatch.py [--ranks 2] [--tokens N ...] [--loads L ...]

Starts a process for each GPU (`--device cpu`: over gloo, at small sizes, to try it). Shapes are Qwen3-30B-A3B's unless
said otherwise. Every rank has `tokens` tokens of its own; passes are without gradient, where both ways are possible.
Loads: `balanced`, every expert the same count, and every rank for every token; `zipf`, experts drawn with weights
1/rank, in a random order over the ranks. Ways take turns; a time is the median, of the slowest rank.

`out`: rows to the experts, packed or in BF16; `out, a row a slot`: BF16 without sending a row once for all its slots
there; `back`: FC2's rows. Bytes are those that the busiest rank sends to others; what stays is not counted.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kernels import backends
from kernels.catalogue import named_spec
from kernels.experts import ExpertWeights
from kernels.guard import NonFiniteGuard
from kernels.slots import slot_spec
from kernels.spec import ExecutionSpec
from learner.dispatch import Exchange, Pack, Routes, expert_parallel

Call = Callable[[], object]


class Layer:
    """The experts `own` of a layer on this device, under `spec`."""

    def __init__(self, given: argparse.Namespace, own: range, spec: ExecutionSpec, device: torch.device):
        self.spec, self.guard = spec, NonFiniteGuard(0, len(own), own.start)
        self.kernels = backends.choose(spec, device)
        parts = [self._quantized(given, expert, device) for expert in own]
        stored = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        weights = ExpertWeights.from_tensors(stored, spec).in_layout(self.kernels.layout)
        self.prepared = self.kernels.prepare(weights, spec)

    def _quantized(
        self, given: argparse.Namespace, expert: int, device: torch.device
    ) -> dict[str, torch.Tensor]:
        generator = torch.Generator(device).manual_seed(expert)
        shapes = (1, 2 * given.ffn, given.hidden), (1, given.hidden, given.ffn)
        w13, w2 = (torch.randn(s, generator=generator, device=device) / s[2] ** 0.5 for s in shapes)
        return self.kernels.quantize(w13.bfloat16(), w2.bfloat16(), self.spec).tensors()

    def __call__(self, x: object, ids: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return self.kernels.forward(x, ids, p, self.prepared, self.spec, self.guard)


def routes_of(load: str, tokens: int, given: argparse.Namespace, rank: int) -> torch.Tensor:
    """int64 [tokens, k], on the CPU."""
    experts, top_k = given.experts, given.top_k
    if load == "balanced":
        first = torch.arange(tokens)[:, None] + rank * tokens
        return (first + torch.arange(top_k) * (experts // top_k)) % experts
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(1, experts + 1).float().reciprocal()
    # The k largest weights over exponential noise: a draw without replacement (Efraimidis and Spirakis, 2006).
    generator = torch.Generator().manual_seed(1 + rank)
    noise = -torch.rand(tokens, experts, generator=generator).clamp(min=1e-20).log()
    return order[(weights / noise).topk(top_k).indices]


def medians(
    calls: dict[str, Call], repeats: int, device: torch.device, group: bool = True
) -> dict[str, float]:
    """Milliseconds of each call, in turns; of the slowest rank, unless this rank is alone."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 2):
        for name, call in calls.items():
            if group:
                dist.barrier()
            elapsed = _milliseconds(call, device)
            if number >= 2:
                times[name].append(elapsed)
    found = torch.tensor([sorted(own)[len(own) // 2] for own in times.values()], device=device)
    if group:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return dict(zip(calls, found.tolist(), strict=True))


def _milliseconds(call: Call, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    events[0].record()
    call()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1])


def to_others(exchange: Exchange, row_bytes: int, device: torch.device) -> int:
    """Bytes that the busiest rank sends to others, or receives from them."""
    rank = dist.get_rank()
    counts = [sum(own) - own[rank] for own in (exchange.sent, exchange.received)]
    found = torch.tensor(max(counts) * row_bytes, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def case(
    load: str,
    tokens: int,
    given: argparse.Namespace,
    spec: ExecutionSpec,
    own: Layer,
    alone: Layer | None,
    device: torch.device,
) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group, half = dist.group.WORLD, given.experts // ranks
    generator = torch.Generator(device).manual_seed(100 + rank)
    x = torch.randn(tokens, given.hidden, generator=generator, device=device).bfloat16()
    p = torch.rand(tokens, given.top_k, generator=generator, device=device).softmax(-1)
    ids = routes_of(load, tokens, given, rank).to(device)
    pack = None
    if own.kernels.packs(own.spec):
        assert own.kernels.pack_rows is not None
        pack = partial(own.kernels.pack_rows, spec=own.spec)

    collect = backends.choose(spec, device).collect

    def layer(pack: Pack | None = None) -> torch.Tensor:
        return expert_parallel(x, ids, p, own, half, spec, group, pack, collect)

    calls: dict[str, Call] = {"bf16": layer}
    if pack is not None:
        calls["packed"] = partial(layer, pack)
        assert torch.equal(layer(), layer(pack))
    layers = medians(calls, given.repeats, device)
    own.guard.check()

    routes = Routes.of(ids, half, group)
    rows = x.index_select(0, routes.tokens)
    by_slot = x.index_select(0, routes.order // given.top_k)
    fc2 = x.new_ones(len(routes.ids), given.hidden)
    moves = {"out, bf16": (routes.rows, rows)}
    if pack is not None:
        moves["out, packed"] = (routes.rows, pack(x).records.index_select(0, routes.tokens))
    moves |= {"out, bf16, a row a slot": (routes.slots, by_slot), "back, bf16": (routes.slots.back(), fc2)}
    steps: dict[str, Call] = {name: partial(where.move, what) for name, (where, what) in moves.items()}
    steps |= {
        "routes": lambda: Routes.of(ids, half, group),
        "combine": partial(collect, by_slot, routes.back, ids, p, spec),
    }
    if pack is not None:
        steps["pack"] = lambda: pack(x)
    exchanges = medians(steps, given.repeats, device)
    sizes = {
        name: to_others(where, what.shape[1] * what.element_size(), device)
        for name, (where, what) in moves.items()
    }
    busiest = torch.tensor(len(routes.ids), device=device)
    dist.all_reduce(busiest, dist.ReduceOp.MAX)
    del rows, by_slot, fc2, moves, steps, routes

    if alone is not None:  # rank 0
        one = {"its tokens": (x, ids, p), "all": tuple(torch.cat([t] * ranks) for t in (x, ids, p))}
        if ranks > 1:
            one["all"][1].copy_(torch.cat([routes_of(load, tokens, given, r) for r in range(ranks)]))
        calls = {name: partial(alone, *inputs) for name, inputs in one.items()}
        single = medians(calls, given.repeats, device, group=False)
        _report(load, tokens, int(busiest) / (tokens * given.top_k), layers, single, exchanges, sizes)
    dist.barrier()


def _report(
    load: str,
    tokens: int,
    busiest: float,
    layers: dict[str, float],
    single: dict[str, float],
    exchanges: dict[str, float],
    sizes: dict[str, int],
) -> None:
    ratio = f" ({layers['bf16'] / layers['packed']:.2f}x)" if "packed" in layers else ""
    ways = ", ".join(f"{name} {time:.3f}" for name, time in layers.items())
    print(f"{tokens} tokens a rank, {load}: the busiest rank gets {busiest:.2f} of its even share of slots")
    print(
        f"  layer, ms: {ways}{ratio}; one GPU: {single['its tokens']:.3f}, all ranks' tokens {single['all']:.3f}"
    )
    for name, elapsed in exchanges.items():
        size = sizes.get(name)
        rate = "" if size is None else f" {size / 1e6:10.1f} MB {size / elapsed / 1e6:8.1f} GB/s"
        print(f"  {name:24s} {elapsed:9.3f} ms{rate}")
    sent = {way: sizes[f"out, {way}"] + sizes["back, bf16"] for way in layers}
    print(
        "  both directions, MB: " + ", ".join(f"{way} {size / 1e6:.1f}" for way, size in sent.items()),
        flush=True,
    )


def run(rank: int, port: int, given: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=given.ranks, device_id=device)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=given.ranks)
    half = given.experts // given.ranks
    spec = named_spec(given.spec)
    with torch.no_grad():
        own = Layer(given, range(rank * half, (rank + 1) * half), slot_spec(spec), device)
        alone = Layer(given, range(given.experts), spec, device) if rank == 0 else None
        for tokens in given.tokens:
            for load in given.loads:
                case(load, tokens, given, spec, own, alone, device)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--spec", default="minite", help="bf16 or te_exact: not packed")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--loads", nargs="+", default=["balanced", "zipf"], choices=["balanced", "zipf"])
    for name, value in (
        ("ranks", 2),
        ("hidden", 2048),
        ("ffn", 768),
        ("experts", 128),
        ("top-k", 8),
        ("repeats", 15),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    if given.experts % given.ranks or given.experts % given.top_k:
        parser.error(f"ranks and top-k must divide the {given.experts} experts")
    if given.device == "cuda" and torch.cuda.device_count() < given.ranks:
        parser.error(f"{given.ranks} ranks need as many GPUs, there are {torch.cuda.device_count()}")
    where = torch.cuda.get_device_name() if given.device == "cuda" else "CPU, gloo"
    print(
        f"{given.ranks} x {where}, torch {torch.__version__}: {given.spec}, hidden {given.hidden}, ffn {given.ffn},"
    )
    print(f"{given.experts} experts, top-{given.top_k}, {given.repeats} repeats", flush=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (port, given), nprocs=given.ranks)


if __name__ == "__main__":
    main()

"""The expert layer's products and the whole layer on this GPU, beside BF16 and unfused pipelines in the same run.

    PYTHONPATH=. python scripts/bench/expert_layer.py [--tokens N ...] [--loads L ...] [--trace FILE] [--json FILE]

Shapes are Qwen3-30B-A3B's (hidden 2048, 128 experts top-8, expert FFN 768) unless said otherwise. Ways that are
compared take turns, since the clock of a GPU under load falls; times are medians. Kernels that are bound by bandwidth
alone (quantise, permute, combine): `scripts/bench/quantize.py`.

Loads: `balanced`, every expert the same count; `zipf`, experts drawn with weights 1/rank; `hot`, one expert that every
token takes, the others uniform; `trace`, expert ids from a safetensors file with `topk_ids` [N, k], its rows repeated
as needed. A balanced timing does not predict a learner's: the table says how many experts get a token.

`4 bits` is ours with weights in 4 bits alone, as a serving engine holds them; with rows few enough there is no
difference, since the faster products then read them so in any case.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from pipelines import SPEC, Bf16, OneByOne, Ours, Problem, Unfused, Weights, vllm_experts

from kernels.triton import tuning
from kernels.triton.backward import weight_gradient
from kernels.triton.decode_gemm import decode_gemm
from kernels.triton.grouped_gemm import grouped_gemm
from kernels.triton.grouping import ExpertGroups, group
from kernels.triton.operand import GroupedOperand
from kernels.triton.packed_gemm import packed_gemm
from kernels.triton.quantize import permute_quantize
from kernels.triton.swiglu import swiglu_quantize

Call = Callable[[], object]
FEW = 512  # tokens up to which launches matter, so that times are those of CUDA graphs


@dataclass(frozen=True)
class Row:
    """One line of the table: milliseconds of each way, and what share of a ceiling ours reaches."""

    tokens: int
    load: str
    what: str
    times: dict[str, float]
    share: str

    def line(self) -> str:
        ours = self.times["ours"]
        others = "  ".join(
            f"{name} {time:.4g} ({time / ours:.2f}x)" for name, time in self.times.items() if name != "ours"
        )
        return f"{self.tokens:>7} {self.load:<9} {self.what:<17} {ours:>8.4g} ms  {self.share:<26} {others}"


def medians(calls: dict[str, Call], repeats: int, graphed: bool, inner: int = 4) -> dict[str, float]:
    """Milliseconds of each call; they take turns, `inner` calls at a time, queued so that the host is ahead."""
    if graphed:
        inner = 10
    ready = {
        name: captured(call, inner) if graphed else partial(repeated, call, inner)
        for name, call in calls.items()
    }
    for call in ready.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(repeats):
        for name, call in ready.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / inner)
    return {name: sorted(own)[repeats // 2] for name, own in times.items()}


def repeated(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def captured(call: Call, inner: int) -> Call:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    return graph.replay


def ceilings() -> tuple[float, float]:
    """Bytes a second of a device copy, read and written; operations a second of a dense 16-bit product."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").fill_(1)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    times = medians({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, 15, False)
    return 8 * source.numel() / times["copy"] * 1e3, 2 * 8192**3 / times["product"] * 1e3


def load_ids(load: str, tokens: int, experts: int, top_k: int, trace: torch.Tensor | None) -> torch.Tensor:
    """int64 [tokens, top_k], on the device."""
    generator = torch.Generator().manual_seed(tokens)
    if load == "balanced":
        ids = torch.arange(tokens * top_k).view(tokens, top_k) % experts
    elif load == "trace":
        assert trace is not None
        ids = trace.repeat(-(-tokens // len(trace)), 1)[:tokens]
    else:
        weights = torch.arange(1, experts + 1).float().reciprocal() if load == "zipf" else torch.ones(experts)
        # The k largest weights over exponential noise: a draw without replacement (Efraimidis and Spirakis, 2006).
        noise = -torch.rand(tokens, experts, generator=generator).clamp(min=1e-20).log()
        keys = weights / noise
        if load == "hot":
            keys[:, 0] = torch.inf
        ids = keys.topk(top_k).indices
    return ids.long().cuda()


def products(
    problem: Problem, weights: Weights, bytes_s: float, flops_s: float, repeats: int, tune: bool
) -> list[Row]:
    """FC1 and FC2 alone, and at many tokens the gradient's products of FC2's weight. tune: with the fastest tile of
    those that there are, which the layer then takes too.
    """
    experts = weights.ours.w13.shape[0]
    packed = tuning.reads_packed(problem.ids.numel(), experts)
    groups = group(problem.ids, experts, tuning.tile_rows(problem.ids.numel(), experts) if packed else 128)
    rows = []
    for what, matrix, plain in (("FC1", weights.ours.w13, weights.w13), ("FC2", weights.ours.w2, weights.w2)):
        _, features, width = matrix.shape
        decoded = torch.randn(groups.rows, width, device="cuda").half()
        outer = torch.rand(groups.rows, device="cuda")
        operand = GroupedOperand(None, None, decoded, outer, outer > 2)
        out = torch.empty(groups.rows, features, device="cuda", dtype=torch.bfloat16)
        values = decoded.bfloat16()
        if tune and not packed:
            tuning.measure(
                out.device,
                groups.rows,
                features,
                width,
                lambda tile, operand=operand, matrix=matrix, out=out: grouped_gemm(
                    operand, matrix, groups, out=out, tile=tile
                ),
            )
        offsets = groups.starts[1:]
        plain_t = plain.transpose(1, 2)
        product = (
            grouped_gemm if not packed else decode_gemm if groups.align in tuning.FEW_ROWS else packed_gemm
        )
        calls: dict[str, Call] = {
            "ours": partial(product, operand, matrix, groups, out=out),
            "grouped_mm": partial(torch._grouped_mm, values, plain_t, offs=offsets),
        }
        if not packed:
            calls["4 bits"] = partial(grouped_gemm, operand, replace(matrix, decoded=None), groups, out=out)
        if packed:
            # Without padding, which would count against it.
            used = values[: problem.ids.numel()]
            ends = groups.counts.cumsum(0, dtype=torch.int32)
            calls["grouped_mm"] = partial(torch._grouped_mm, used, plain_t, offs=ends)
        times = medians(calls, repeats, problem.tokens <= FEW)
        active = int((groups.counts > 0).sum())
        moved = active * features * width * (0.5625 if packed else 2) + 2 * problem.ids.numel() * (
            features + width
        )
        rate, flops = (
            moved / times["ours"] * 1e3,
            2 * problem.ids.numel() * features * width / times["ours"] * 1e3,
        )
        if rate / bytes_s > flops / flops_s:
            share = f"{rate / 1e12:.2f} TB/s = {rate / bytes_s:.0%} copy"
        else:
            share = f"{flops / 1e12:.0f} TFLOP/s = {flops / flops_s:.0%} dense"
        rows.append(Row(problem.tokens, problem.load, what, times, share))
        if not packed:
            rows.append(decode_counted(problem, groups, weights.w2.shape[2], rows[-1], repeats))
        if what == "FC2" and not packed:
            d_y = torch.randn(groups.rows, features, device="cuda").bfloat16()
            calls = {
                "ours": partial(weight_gradient, d_y, values, groups, torch.float32),
                "grouped_mm": partial(weight_gradient, d_y, values, groups, torch.bfloat16),
            }
            times = medians(calls, repeats, False)
            flops = 2 * problem.ids.numel() * features * width / times["ours"] * 1e3
            share = f"{flops / 1e12:.0f} TFLOP/s = {flops / flops_s:.0%} dense"
            rows.append(Row(problem.tokens, problem.load, "FC2 wgrad, FP32", times, share))
    return rows


def decode_counted(problem: Problem, groups: ExpertGroups, ffn: int, product: Row, repeats: int) -> Row:
    """The products with what decoding costs: of the activations, which the quantiser writes in 16 bits instead of 4.5;
    of the weights in every call where they are held in 4 bits alone, else nothing, since that is done once.
    """
    activation = SPEC.activation
    assert activation is not None
    if product.what == "FC1":
        quantise = partial(permute_quantize, problem.x, groups, activation)
    else:
        fc1 = torch.randn(groups.rows, 2 * ffn, device="cuda").bfloat16()
        quantise = partial(swiglu_quantize, fc1, groups, activation, keep_act=False)
    times = medians(
        {
            "decoded": partial(quantise, packed=False, decoded=True),
            "packed": partial(quantise, packed=True, decoded=False),
        },
        repeats,
        problem.tokens <= 8192,
    )
    activations = max(0.0, times["decoded"] - times["packed"])
    return replace(
        product,
        what=f"{product.what}, decode",
        times={
            "ours": product.times["ours"] + activations,
            "grouped_mm": product.times["grouped_mm"],
            "4 bits": product.times["4 bits"] + activations,
        },
        share=f"activations' decode {activations:.4f}",
    )


def layers(problem: Problem, weights: Weights, flops_s: float, repeats: int) -> list[Row]:
    """The whole layer, forward and, at many tokens, forward and backward."""
    _, two_ffn, hidden = weights.w13.shape
    operations = 2 * problem.ids.numel() * hidden * two_ffn * 1.5
    ours, plain = Ours(problem, weights), Bf16(problem, weights)
    calls: dict[str, Call] = {"ours": ours.forward, "bf16": plain.forward}
    if not tuning.reads_packed(problem.ids.numel(), len(weights.w13)):
        calls["4 bits"] = Ours(problem, weights.compact()).forward
    fused = vllm_experts(problem, weights)
    if fused is not None:
        calls["vllm"] = fused
    few = problem.tokens <= FEW
    if not few:
        calls["unfused"] = Unfused(problem, weights).forward
    # A graph where the host could be late; larger than that, one would hold too much memory.
    times = medians(calls, repeats, problem.tokens <= 8192)
    if not few:
        times |= medians({"one by one": OneByOne(problem, weights).forward}, 1, False, 1)
    flops = operations / times["ours"] * 1e3

    def share(flops: float) -> str:
        return f"{flops / 1e12:.0f} TFLOP/s = {flops / flops_s:.0%} dense"

    rows = [Row(problem.tokens, problem.load, "layer forward", times, share(flops))]
    if not few:
        both: dict[str, Call] = {"ours": ours.both, "bf16": plain.both}
        times = medians(both, repeats, problem.tokens <= 8192)
        rows.append(
            Row(
                problem.tokens,
                problem.load,
                "forward+backward",
                times,
                share(3 * operations / times["ours"] * 1e3),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[32, 64, 256, 512, 1024, 2048, 4096, 8192, 65536, 131072]
    )
    parser.add_argument(
        "--loads", nargs="+", default=["balanced", "zipf", "hot"], choices=["balanced", "zipf", "hot"]
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--tune", action="store_true", help="measure the tiles, instead of the defaults")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    trace = None
    if given.trace is not None:
        from safetensors.torch import load_file

        trace = load_file(given.trace)["topk_ids"]
    bytes_s, flops_s = ceilings()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: device copy {bytes_s / 1e12:.2f} TB/s,",
        end=" ",
    )
    print(f"dense bf16 product {flops_s / 1e12:.0f} TFLOP/s")
    weights = Weights.random(given.experts, given.hidden, given.ffn)
    print("vllm: compared" if vllm_experts(None, weights) is not None else "vllm: not installed, not run")
    if trace is None:
        print("trace: none given, not run")
    rows = []
    for tokens in given.tokens:
        for load in [*given.loads, *(["trace"] if trace is not None else [])]:
            ids = load_ids(load, tokens, given.experts, given.top_k, trace)
            counts = torch.bincount(ids.flatten(), minlength=given.experts)
            active, most = int((counts > 0).sum()), int(counts.max())
            print(
                f"{tokens:>7} {load:<9} {active} of {given.experts} experts active, at most {most} rows",
                flush=True,
            )
            problem = Problem.random(ids, load, given.hidden)
            new = products(problem, weights, bytes_s, flops_s, given.repeats, given.tune)
            new += layers(problem, weights, flops_s, given.repeats)
            for row in new:
                print(row.line(), flush=True)
            rows += new
            torch.cuda.empty_cache()
    if given.json is not None:
        found = {"copy_bytes_s": bytes_s, "dense_flop_s": flops_s, "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

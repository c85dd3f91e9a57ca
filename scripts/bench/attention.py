"""Causal attention over packed sequences: `kernels.triton.outside.attention` beside FlashAttention 2 as torch has it.

    PYTHONPATH=. python scripts/bench/attention.py

Two packings, with the heads of Qwen3-30B-A3B: lengths of a log-normal distribution (mean 1,064, at most 8,192), and
sequences of 2,048. Printed for each: milliseconds and useful TFLOP/s of forward and gradient, FlashAttention's gradient
once as it is and once deterministic, differences between the two, and whether the bits are the same at a second call
and for a sequence alone. Then, for the first packing, every candidate tile of each kernel, fastest first. Needs an
NVIDIA GPU. Useful is what the products of the causal half take: 2 of them forward, 5 in the gradient, which computes 7.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.triton.outside.attention import attention
from kernels.triton.outside.attention_blocks import Blocks, Tile, tiling
from kernels.triton.outside.attention_gradient import attention_gradient, key_gradient, query_gradient

# Of 64 x 64 with 4 warps, and of 128 x 64 with 4, two programs fit a processor.
CANDIDATES = {
    128: {
        "forward": (Tile(128, 128, 3, 8), Tile(128, 64, 3, 8), Tile(64, 64, 3, 4), Tile(64, 64, 2, 4)),
        "dQ": (Tile(128, 64, 3, 8), Tile(64, 64, 3, 4), Tile(64, 64, 2, 4)),
        "dK, dV": (Tile(64, 128, 2, 8), Tile(64, 64, 3, 4), Tile(64, 64, 2, 4)),
    },
    64: {
        "forward": (Tile(128, 64, 3, 8), Tile(64, 64, 3, 4), Tile(64, 64, 2, 4)),
        "dQ": (Tile(128, 64, 3, 8), Tile(64, 64, 3, 4), Tile(64, 64, 2, 4)),
        "dK, dV": (Tile(64, 128, 2, 8), Tile(64, 64, 3, 4), Tile(64, 64, 2, 4)),
    },
}


@dataclass(frozen=True)
class Case:
    lengths: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor
    bounds: torch.Tensor
    longest: int
    scale: float

    @classmethod
    def random(cls, lengths: torch.Tensor, heads: int, groups: int, width: int) -> Case:
        """v: rows of a wider matrix, as the learner's projection leaves it."""
        tokens = int(lengths.sum())
        torch.manual_seed(0)
        made = [
            torch.randn(tokens, count, width, dtype=torch.bfloat16, device="cuda")
            for count in (heads, groups, heads + 2 * groups, heads)
        ]
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
        q, k, wide, d_out = made
        return cls(lengths, q, k, wide[:, -groups:], d_out, bounds, int(lengths.max()), width**-0.5)

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    @property
    def place(self) -> tuple[torch.Tensor, int, float]:
        return self.bounds, self.longest, self.scale

    def useful(self, products: int) -> float:
        """Operations of so many products over the causal half."""
        return products * self.q.shape[1] * self.q.shape[2] * float(self.lengths.double().square().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("tokens", 65536), ("mean", 1064), ("longest", 8192), ("heads", 32), ("groups", 4), ("width", 128),
        ("repeats", 10),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-candidates", action="store_true")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    shape = given.heads, given.groups, given.width
    cases = {
        "log-normal": Case.random(drawn_lengths(given.tokens, given.mean, given.longest), *shape),
        "2,048 each": Case.random(torch.full((max(1, given.tokens // 2048),), 2048), *shape),
    }
    for name, case in cases.items():
        print(f"{name}: {len(case.lengths)} sequences, {len(case.q):,} tokens, longest {case.longest:,}")
        compare(case, given.repeats)
    if not given.no_candidates:
        for kernel, tiles in CANDIDATES.get(given.width, {}).items():
            try_candidates(cases["log-normal"], kernel, tiles, given.repeats)


def drawn_lengths(tokens: int, mean: int, longest: int) -> torch.Tensor:
    """int64, of as many sequences as `tokens` hold; the distribution of scripts/bench/learner_update.py."""
    sigma = 0.7
    normal = torch.randn(tokens, generator=torch.Generator().manual_seed(0))
    drawn = (mean * (sigma * normal - sigma**2 / 2).exp()).long().clamp(2, min(longest, tokens))
    return drawn[: max(1, int((drawn.cumsum(0) <= tokens).sum()))]


def compare(case: Case, repeats: int) -> None:
    blocks = Blocks(case.bounds, case.longest, len(case.q))
    out, lse = attention(*case.operands, *case.place, blocks=blocks)
    own = out, *attention_gradient(case.d_out, *case.operands, out, lse, *case.place, blocks=blocks)
    torch.cuda.synchronize()
    flash_out, flash_backward = flash(case)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # as in the learner
    theirs = flash_out, *flash_backward()
    for name, mine, other in zip(("out", "dQ", "dK", "dV"), own, theirs, strict=True):
        difference = (mine.float() - other.float()).abs()
        relative = difference.square().mean().sqrt() / other.float().square().mean().sqrt()
        print(
            f"  {name:<4} against FlashAttention: RMS {relative:.2e} of its own, at most {difference.max():.2e}"
        )
    print(f"  same bits at a second call: {repeated(case, own)}; for a sequence alone: {alone(case, own)}")
    made = timed(lambda: make_tables(case), repeats)
    print(f"  tables of blocks, once a micro-batch: {made:.3f} ms")
    report("forward", case, 2, timed(lambda: attention(*case.operands, *case.place, blocks=blocks), repeats))
    report(
        "gradient",
        case,
        5,
        timed(
            lambda: attention_gradient(case.d_out, *case.operands, out, lse, *case.place, blocks=blocks),
            repeats,
        ),
    )
    report("FlashAttention 2 forward", case, 2, timed(lambda: flash_forward(case), repeats))
    report("FlashAttention 2 gradient, deterministic", case, 5, timed(flash_backward, max(1, repeats // 3)))
    torch.use_deterministic_algorithms(False)
    report("FlashAttention 2 gradient", case, 5, timed(flash_backward, repeats))


def make_tables(case: Case) -> None:
    tiles = tiling(case.q.shape[2])
    blocks = Blocks(case.bounds, case.longest, len(case.q))
    blocks.of_queries(tiles.forward.queries)
    blocks.of_queries(tiles.d_query.queries)
    blocks.of_keys(tiles.d_key.keys)


def repeated(case: Case, first: Sequence[torch.Tensor]) -> bool:
    out, lse = attention(*case.operands, *case.place)
    again = out, *attention_gradient(case.d_out, *case.operands, out, lse, *case.place)
    return all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def alone(case: Case, whole: Sequence[torch.Tensor]) -> bool:
    """Of the longest sequence, and of the one behind the first."""
    for which in (int(case.lengths.argmax()), min(1, len(case.lengths) - 1)):
        start, end = case.bounds[which].item(), case.bounds[which + 1].item()
        q, k, v, d_out = (x[start:end] for x in (*case.operands, case.d_out))
        bounds = torch.tensor([0, end - start], dtype=torch.int32, device="cuda")
        out, lse = attention(q, k, v, bounds, end - start, case.scale)
        found = out, *attention_gradient(d_out, q, k, v, out, lse, bounds, end - start, case.scale)
        if not all(torch.equal(one[start:end], other) for one, other in zip(whole, found, strict=True)):
            return False
    return True


def flash_forward(case: Case) -> tuple[torch.Tensor, ...]:
    bounds, longest, scale = case.place
    return torch.ops.aten._flash_attention_forward(
        *case.operands, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )


def flash(case: Case) -> tuple[torch.Tensor, Callable[[], tuple[torch.Tensor, ...]]]:
    out, lse, seed, offset, _ = flash_forward(case)
    bounds, longest, scale = case.place

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._flash_attention_backward(
            case.d_out, *case.operands, out, lse, bounds, bounds, longest, longest, 0.0, True, seed, offset,
            scale=scale,
        )  # fmt: skip

    return out, backward


def try_candidates(case: Case, kernel: str, tiles: Sequence[Tile], repeats: int) -> None:
    blocks = Blocks(case.bounds, case.longest, len(case.q))
    out, lse = attention(*case.operands, *case.place, blocks=blocks)
    defaults = tiling(case.q.shape[2])
    given = (case.d_out, *case.operands)
    d_q, rows = query_gradient(*given, out, lse, case.scale, blocks, defaults.d_query)
    d_k = key_gradient(*given, rows, case.scale, blocks, defaults.d_key)[0]
    ways: dict[str, tuple[int, Callable[[Tile], tuple[torch.Tensor, ...]], torch.Tensor]] = {
        "forward": (2, lambda tile: attention(*case.operands, *case.place, blocks=blocks, tile=tile), out),
        "dQ": (3, lambda tile: query_gradient(*given, out, lse, case.scale, blocks, tile)[:1], d_q),
        "dK, dV": (4, lambda tile: key_gradient(*given, rows, case.scale, blocks, tile), d_k),
    }
    products, run, right = ways[kernel]
    found = []
    for tile in tiles:
        started = time.perf_counter()
        try:
            error = (run(tile)[0].float() - right.float()).abs().max().item()
            torch.cuda.synchronize()
        except Exception as problem:  # a candidate too large for the device
            print(f"  {kernel} {tile}: {type(problem).__name__}: {str(problem).splitlines()[0][:120]}")
            continue
        compiled = time.perf_counter() - started
        found.append((timed(lambda tile=tile: run(tile), repeats), tile, error, compiled))
    print(f"{kernel}, candidates (TFLOP/s of the {products} products it computes of the causal half):")
    for ms, tile, error, compiled in sorted(found, key=lambda row: row[0]):
        speed = case.useful(products) / ms / 1e9
        print(
            f"  {tile.queries:>3} queries, {tile.keys:>3} keys, {tile.stages} stages, {tile.warps} warps"
            f": {ms:7.3f} ms"
            f" {speed:6.0f} TFLOP/s, differs by {error:.1e}, ready after {compiled:.1f} s"
        )


def timed(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds, the median."""
    run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def report(name: str, case: Case, products: int, ms: float) -> None:
    print(f"  {name:<42} {ms:8.3f} ms {case.useful(products) / ms / 1e9:6.0f} TFLOP/s")


if __name__ == "__main__":
    main()

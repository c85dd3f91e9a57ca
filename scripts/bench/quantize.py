"""Rates of the bandwidth kernels on this GPU, beside a device copy in the same run.

    PYTHONPATH=. python scripts/bench/quantize.py [--tokens N] [--hidden N] [--ffn N] [--experts N] [--top-k N]

Bytes are those that have to move once: inputs read, outputs written. Times are those of a CUDA graph's replay. `copy`
is a device copy of 4 GiB. The unfused way permutes the BF16 rows with `torch.index_select` and quantises all of
them with the same quantiser.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.catalogue import named_spec
from kernels.triton.combine import combine
from kernels.triton.grouping import ExpertGroups, group
from kernels.triton.operand import GroupedOperand
from kernels.triton.packed_rows import pack_rows, permute_packed
from kernels.triton.quantize import launch_rows, permute_quantize
from kernels.triton.swiglu import swiglu_quantize
from kernels.triton.weights import quantize_and_flag

Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Case:
    name: str
    moved: int  # bytes
    call: Call


def milliseconds(call: Call, repeats: int = 20) -> float:
    """The median of `repeats` replays of a CUDA graph of the call, so that the host's time does not count."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median(graph.replay, repeats)


def median(call: Call, repeats: int) -> float:
    """Milliseconds between events around the call."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    call()
    torch.cuda.synchronize()
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def copy_rate(size: int = 4 << 30) -> float:
    """Bytes read and written a second by a device copy. Not from a graph, where a copy is slower (2.8 of 4.3 TB/s)."""
    source = torch.empty(size // 4, dtype=torch.int32, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return 2 * size / median(lambda: target.copy_(source), 20) * 1e3


def size_of(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def used_size(operand: GroupedOperand, share: float) -> int:
    """Bytes of the rows in use, padding included."""
    parts = (operand.codes, operand.block_scales, operand.decoded, operand.outer_scales, operand.bad)
    return int(share * size_of(*parts))


def row_buffers(rows: int, width: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.empty(rows, width // 2, dtype=torch.uint8, device="cuda"),
        torch.empty(rows, width // 16, dtype=torch.uint8, device="cuda"),
        torch.empty(rows, 1, dtype=torch.float32, device="cuda"),
        torch.empty(rows, dtype=torch.uint8, device="cuda"),
    )


def permute_cases(x: torch.Tensor, groups: ExpertGroups, top_k: int) -> list[Case]:
    """Fused in three output forms, and unfused."""
    activation = named_spec("minite").activation
    assert activation is not None
    used = int(groups.starts[-1])
    share = used / groups.rows
    cases = []
    for form in (
        {"packed": True, "decoded": False},
        {"packed": False, "decoded": True},
        {"packed": True, "decoded": True},
    ):
        name = "permute and quantise, " + " and ".join(key for key, wanted in form.items() if wanted)
        operand = permute_quantize(x, groups, activation, **form)
        moved = size_of(x, groups.row_of_slot) + used_size(operand, share)
        del operand
        cases.append(Case(name, moved, lambda form=form: permute_quantize(x, groups, activation, **form)))
    tokens = (groups.slot_of_row[:used] // top_k).clamp(min=0)
    buffers = row_buffers(used, x.shape[1])

    def unfused() -> None:
        launch_rows(x.index_select(0, tokens), *buffers)

    cases.append(
        Case(
            "unfused: permute, then quantise, packed",
            size_of(x, *buffers) + 2 * used * x.shape[1] * 2,
            unfused,
        )
    )
    return cases


def cases(shape: Shape) -> list[Case]:
    spec, expert_spec = named_spec("minite"), named_spec("minite_expert")
    activation = spec.activation
    assert activation is not None and spec.weight is not None and expert_spec.weight is not None
    torch.manual_seed(0)
    x = torch.randn(shape.tokens, shape.hidden, device="cuda").bfloat16()
    ids = torch.rand(shape.tokens, shape.experts, device="cuda").topk(shape.top_k).indices
    coefficients = torch.rand(shape.tokens, shape.top_k, device="cuda")
    groups = group(ids, shape.experts)
    used = int(groups.starts[-1])
    share = used / groups.rows

    buffers = row_buffers(shape.tokens, shape.hidden)
    found = [
        Case(
            "group", size_of(ids, groups.row_of_slot, groups.slot_of_row), lambda: group(ids, shape.experts)
        ),
        Case("quantise rows", size_of(x, *buffers), lambda: launch_rows(x, *buffers)),
        *permute_cases(x, groups, shape.top_k),
    ]
    packed = pack_rows(x, activation)
    records, decoded = packed.records, used_size(permute_packed(packed, groups), share)
    found += [
        Case("quantise rows into records", size_of(x, records), lambda: pack_rows(x, activation)),
        Case("permute records, decoded", size_of(records) + decoded, lambda: permute_packed(packed, groups)),
    ]
    fc1 = torch.randn(groups.rows, 2 * shape.ffn, device="cuda").bfloat16()
    for packed, decoded, keep in ((True, False, False), (False, True, False), (False, True, True)):
        form = [
            name for name, wanted in (("packed", packed), ("decoded", decoded), ("act kept", keep)) if wanted
        ]

        def run(
            packed: bool = packed, decoded: bool = decoded, keep: bool = keep
        ) -> tuple[GroupedOperand, torch.Tensor | None]:
            return swiglu_quantize(fc1, groups, activation, packed=packed, decoded=decoded, keep_act=keep)

        operand, act = run()
        moved = int(share * size_of(fc1, act)) + used_size(operand, share)
        del operand, act
        found.append(Case("SwiGLU and quantise, " + ", ".join(form), moved, run))
    fc2 = torch.randn(groups.rows, shape.hidden, device="cuda").bfloat16()
    moved = shape.tokens * shape.top_k * shape.hidden * 2 + size_of(x, coefficients, groups.row_of_slot)
    found.append(Case("combine", moved, lambda: combine(fc2, groups, coefficients, spec)))
    w13 = torch.randn(shape.experts, 2 * shape.ffn, shape.hidden, device="cuda").bfloat16()
    moved = size_of(w13) + w13.numel() * 9 // 16
    for name, weight in (("row", spec.weight), ("expert", expert_spec.weight)):
        found.append(
            Case(
                f"quantise w13, outer scale per {name}",
                moved,
                lambda weight=weight: quantize_and_flag(w13, weight),
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("tokens", 65536), ("hidden", 2048), ("ffn", 768), ("experts", 128), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    shape = Shape(**vars(parser.parse_args()))
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", shape)
    copy = copy_rate()
    print(f"copy: {copy / 1e12:.2f} TB/s")
    print(f"{'':52s} {'ms':>8s} {'GB':>7s} {'TB/s':>6s} {'of copy':>8s}")
    times = {}
    for case in cases(shape):
        times[case.name] = milliseconds(case.call)
        rate = case.moved / times[case.name] * 1e3
        print(
            f"{case.name:52s} {times[case.name]:8.4f} {case.moved / 1e9:7.3f} {rate / 1e12:6.2f} {rate / copy:8.2f}"
        )
    unfused = times["unfused: permute, then quantise, packed"]
    print(f"unfused over fused, packed: {unfused / times['permute and quantise, packed']:.2f}")


if __name__ == "__main__":
    main()

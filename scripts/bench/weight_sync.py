"""A weight sync within one device: BF16 masters -> packed tensors of a sampler, attested, by the real protocol.

    python scripts/bench/weight_sync.py --quantiser triton                      # one GPU of 141 GB, Qwen3-30B-A3B
    python scripts/bench/weight_sync.py --device cpu --layers 2 --experts 4 --hidden 256 --ffn 128 --vocab 1000

Random weights in the geometry of Qwen3-30B-A3B (48 layers, 128 experts of width 768, hidden 2048). Printed, for the
best of the rounds and each of its phases: seconds, and the share of the limit that memory traffic sets (bytes that must
be read and written, at the rate of a copy on the same device). The baseline, in the same run, is the path of a stock
engine that quantises online: every expert's gate, up and down matrix comes by its own name in BF16, is copied into its
place in a BF16 buffer, and is then quantised, expert by expert, by the same quantiser. `--layout tiles` (the default
with --quantiser triton) is the order that a sampler on Hopper holds and computes with; `rows` that of the codes.

Phases: quantise (learner; laid out, too), pack (chunks and the digests in them), check (the receiver's checks on
arrival), install (live tensors replaced, decode scales made), attest (hashes of what is held).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.catalogue import named_spec
from kernels.experts import (
    ExpertWeights,
    StoredLayout,
    WeightQuantizer,
    derived_name,
    expert_layout,
    wire_name,
)
from kernels.precision_map import PrecisionMap
from kernels.quantize import QuantizedTensor, decode_scale, quantize_weight
from kernels.shard import NO_SHARDS, Shards
from kernels.spec import ExecutionSpec
from rl.sync.protocol import attest
from rl.sync.receiver import Receiver
from rl.sync.sender import Named, Sender

Entries = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Geometry:
    layers: int
    experts: int
    hidden: int
    ffn: int
    vocab: int

    def outside(self) -> dict[str, tuple[int, ...]]:
        """Attention of 32 heads of 128 with 4 key-value heads for each 2048 of width, router, embeddings; no norms."""
        wide, narrow = 2 * self.hidden, self.hidden // 4
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (self.vocab, self.hidden),
            "head": (self.vocab, self.hidden),
        }
        for layer in range(self.layers):
            shapes |= {f"{layer}.q": (wide, self.hidden), f"{layer}.o": (self.hidden, wide)}
            shapes |= {f"{layer}.k": (narrow, self.hidden), f"{layer}.v": (narrow, self.hidden)}
            shapes[f"{layer}.router"] = (self.experts, self.hidden)
        return shapes


class Learner:
    """An `rl.sync.sender.Source` of random BF16 weights, quantised when they are asked for, layer by layer."""

    def __init__(self, geometry: Geometry, quantizer: WeightQuantizer, device: str) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)

        self.geometry, self.quantizer = geometry, quantizer
        self.outside = {name: random(*shape) for name, shape in geometry.outside().items()}
        experts, hidden, ffn = geometry.experts, geometry.hidden, geometry.ffn
        self.masters = [
            (random(experts, 2 * ffn, hidden), random(experts, hidden, ffn)) for _ in range(geometry.layers)
        ]
        self.scales: dict[str, torch.Tensor] = {}  # derived, of the export before

    def export_layout(self, precision_map: PrecisionMap, layout: StoredLayout) -> Entries:
        return entries(self.geometry, precision_map, layout)

    def export(self, precision_map: PrecisionMap, layout: StoredLayout) -> Named:
        yield from self.outside.items()
        for layer, (masters, spec) in enumerate(zip(self.masters, precision_map.layers, strict=True)):
            weights = ExpertWeights.quantize(*masters, spec, self.quantizer).in_layout(layout)
            self.scales |= decode_scales(layer, weights.tensors(), spec)
            for part, tensor in weights.tensors().items():
                yield wire_name(layer, part), tensor

    def export_operands(self, precision_map: PrecisionMap) -> Named:
        yield from self.outside.items()
        for layer, masters in enumerate(self.masters):
            yield wire_name(layer, "w13.weight"), masters[0]
            yield wire_name(layer, "w2.weight"), masters[1]

    def export_derived(self, precision_map: PrecisionMap, layout: StoredLayout) -> Named:
        yield from self.scales.items()

    def by_expert(self) -> Iterator[tuple[int, int, str, torch.Tensor]]:
        """Layer, expert, matrix and BF16 tensor, as a checkpoint has them."""
        ffn = self.geometry.ffn
        for layer, (w13, w2) in enumerate(self.masters):
            for expert in range(self.geometry.experts):
                yield layer, expert, "gate", w13[expert, :ffn]
                yield layer, expert, "up", w13[expert, ffn:]
                yield layer, expert, "down", w2[expert]


class Sampler:
    """An `rl.sync.receiver.Holder`: packed tensors, and the decode scales that its products take."""

    def __init__(
        self, geometry: Geometry, precision_map: PrecisionMap, layout: StoredLayout, device: str
    ) -> None:
        self.precision_map, self.layout, self.version = precision_map, layout, 0
        self.closed: str | None = None
        self.shards: Shards = NO_SHARDS
        self._live = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in entries(geometry, precision_map, layout).items()
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._live

    def refresh(self) -> dict[str, torch.Tensor]:
        derived = {}
        for layer, spec in enumerate(self.precision_map.layers):
            prefix = wire_name(layer, "")
            keys = [f"{matrix}.outer_scales" for matrix in ("w13", "w2")]
            derived |= decode_scales(layer, {key: self._live[prefix + key] for key in keys}, spec)
        return derived


def entries(geometry: Geometry, precision_map: PrecisionMap, layout: StoredLayout) -> Entries:
    found: Entries = {name: (shape, torch.bfloat16) for name, shape in geometry.outside().items()}
    for layer, spec in enumerate(precision_map.layers):
        sizes = geometry.experts, geometry.hidden, geometry.ffn
        for part, entry in expert_layout(*sizes, spec, layout).items():
            found[wire_name(layer, part)] = entry
    return found


def decode_scales(
    layer: int, stored: dict[str, torch.Tensor], spec: ExecutionSpec
) -> dict[str, torch.Tensor]:
    derived = {}
    for matrix in ("w13", "w2"):
        assert spec.weight is not None
        outer = stored[f"{matrix}.outer_scales"]
        quantized = QuantizedTensor(outer, None, outer)  # the codes do not matter
        scale = decode_scale(quantized, spec.weight)
        assert scale is not None
        derived[derived_name(layer, f"{matrix}.outer_scales")] = scale.clone()
    return derived


class Clock:
    """Seconds of each phase, the device's work included."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, work: Callable[[], object]) -> object:
        self.settle()
        started = time.perf_counter()
        result = work()
        self.settle()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
        return result

    def settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def packed_sync(sender: Sender, receiver: Receiver, version: int, bucket: int, clock: Clock) -> None:
    """One sync; a chunk is handed over as it is, which is what CUDA IPC does between two processes."""
    said = sender.open(str(version), version, "packed", bucket)
    receiver.begin(said)
    for _ in range(said.chunks):
        chunk = clock("make", sender.chunk)
        clock("check", lambda chunk=chunk: receiver.receive(chunk))
    installed = clock("end", lambda: receiver.end(said.session))
    sent = clock("attest, learner", sender.close)
    attest(sent.digests, installed.digests, "the sampler", version)  # type: ignore[attr-defined]
    receiver.commit(said.session)
    clock.seconds["quantise"] = sent.seconds["quantise"]  # type: ignore[attr-defined]
    clock.seconds["pack"] = clock.seconds.pop("make") - sent.seconds["quantise"]  # type: ignore[attr-defined]
    clock.seconds["install"] = installed.seconds["install"]  # type: ignore[attr-defined]
    clock.seconds["attest, sampler"] = installed.seconds["attest"]  # type: ignore[attr-defined]
    del clock.seconds["end"]


def per_tensor_sync(learner: Learner, sampler: Sampler) -> None:
    """The baseline: one BF16 tensor after another, then one expert after another."""
    geometry, live = learner.geometry, sampler.tensors()
    for name, tensor in learner.outside.items():
        live[name].copy_(tensor)
    w13 = torch.empty_like(learner.masters[0][0])
    w2 = torch.empty_like(learner.masters[0][1])
    places = {"gate": w13[:, : geometry.ffn], "up": w13[:, geometry.ffn :], "down": w2}
    for layer, expert, matrix, tensor in learner.by_expert():
        places[matrix][expert].copy_(tensor)
        if (expert, matrix) != (geometry.experts - 1, "down"):
            continue
        spec = sampler.precision_map.spec_for(layer)
        for own in range(geometry.experts):
            masters = w13[own : own + 1], w2[own : own + 1]
            weights = ExpertWeights.quantize(*masters, spec, learner.quantizer).in_layout(sampler.layout)
            for part, packed in weights.tensors().items():
                live[wire_name(layer, part)][own].copy_(packed[0])
    sampler.refresh()


def copy_rate(device: str, nbytes: int, settle: Callable[[], None]) -> float:
    """Bytes read and written in a second by a copy."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        settle()
        started = time.perf_counter()
        target.copy_(source)
        settle()
        best = max(best, 2 * nbytes / (time.perf_counter() - started))
    return best


def traffic(geometry: Geometry, precision_map: PrecisionMap) -> dict[str, int]:
    """Bytes that each phase must move at the least."""
    experts = geometry.layers * geometry.experts * 3 * geometry.hidden * geometry.ffn * 2
    sizes = {
        name: torch.Size(shape).numel() * dtype.itemsize
        for name, (shape, dtype) in entries(geometry, precision_map, StoredLayout.ROWS).items()
    }
    held = sum(sizes.values())
    packed = sum(size for name, size in sizes.items() if ".experts." in name)
    return {
        "quantise": experts + packed,
        "pack": held,
        "check": held,
        "install": 2 * held,
        "attest, learner": 0,  # hashed as the chunks are made: part of `pack`
        "attest, sampler": held,
        "baseline": 3 * experts + 3 * packed + 2 * (held - packed),
    }


def main() -> None:
    arguments = parse()
    geometry = Geometry(arguments.layers, arguments.experts, arguments.hidden, arguments.ffn, arguments.vocab)
    precision_map = PrecisionMap.resolve(geometry.layers, named_spec(arguments.spec))
    learner = Learner(geometry, quantiser(arguments.quantiser), arguments.device)
    layout = StoredLayout(arguments.layout or ("tiles" if arguments.quantiser == "triton" else "rows"))
    sampler = Sampler(geometry, precision_map, layout, arguments.device)
    sender, receiver = Sender(learner, precision_map, keep=False, layout=layout), Receiver(sampler)
    clock = Clock(arguments.device)
    rate = copy_rate(arguments.device, arguments.copy_mib * 2**20, clock.settle)
    print(f"{arguments.device}, {geometry}, spec {arguments.spec}, quantiser {arguments.quantiser}, {layout}")
    print(f"copy: {rate / 1e9:.1f} GB/s read and written")
    rounds = []
    for version in range(1, arguments.rounds + 2):  # the first one warms up
        clock = Clock(arguments.device)
        packed_sync(sender, receiver, version, arguments.bucket_mib * 2**20, clock)
        rounds.append(clock.seconds)
    best = min(rounds[1:], key=lambda seconds: sum(seconds.values()))
    own = sampler.tensors()
    before = {
        name: tensor.clone() for name, tensor in own.items() if name.startswith("model.layers.0.experts.")
    }
    baselines = []
    for _ in range(arguments.baseline_rounds):
        clock = Clock(arguments.device)
        clock("baseline", lambda: per_tensor_sync(learner, sampler))
        baselines.append(clock.seconds["baseline"])
    same = all(torch.equal(tensor, own[name]) for name, tensor in before.items())
    show(best, traffic(geometry, precision_map), rate, min(baselines), same)


def show(best: dict[str, float], moved: dict[str, int], rate: float, baseline: float, same: bool) -> None:
    order = ("quantise", "pack", "install", "check", "attest, learner", "attest, sampler")
    print(f"{'phase':28s} {'seconds':>9s} {'GB moved':>9s} {'of the limit':>12s}")

    def line(name: str, seconds: float, nbytes: int) -> None:
        share = f"{nbytes / rate / seconds:12.1%}" if nbytes else " " * 12
        print(f"{name:28s} {seconds:9.4f} {nbytes / 1e9:9.2f} {share}")

    for phase in order:
        line(phase, best[phase], moved[phase])
    first = order[:3]
    line("quantise, pack, install", sum(best[p] for p in first), sum(moved[p] for p in first))
    line("all, attested", sum(best[p] for p in order), sum(moved[p] for p in order))
    line("baseline, not attested", baseline, moved["baseline"])
    print(
        f"the baseline takes {baseline / sum(best[p] for p in order):.1f} times as long; same bytes: {same}"
    )


def quantiser(name: str) -> WeightQuantizer:
    if name == "reference":
        return quantize_weight
    from kernels.triton.weights import quantize_weight as triton_quantize_weight

    return triton_quantize_weight


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quantiser", choices=("reference", "triton"), default="reference")
    parser.add_argument("--layout", choices=[str(layout) for layout in StoredLayout])
    parser.add_argument("--spec", default="minite")
    for name, default in (
        ("layers", 48),
        ("experts", 128),
        ("hidden", 2048),
        ("ffn", 768),
        ("vocab", 151936),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--copy-mib", type=int, default=256, help="size of the copy that sets the limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--baseline-rounds", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()

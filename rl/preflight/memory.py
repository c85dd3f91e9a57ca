"""Bytes that one rank of the learner, and one of a sampler, holds at most, by what it holds them for.

Each figure follows from what the code allocates: `learner.optimizer` (FP32 masters, moments and accumulated gradients),
`learner.moe` (the quantised form beside the masters), `learner.logprobs` (chunks of FP32 logits),
`sampler.quantization` and `rl.sync` (staged and kept copies), `kernels.strict` (weights in fixed point). What autograd
saves: `rl.preflight.activations`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from kernels.backends import gpu_backend
from kernels.experts import can_stand_in_tiles, expert_layout
from kernels.precision_map import PrecisionMap
from kernels.quantizer_spec import BlockScaleFormat, ScaleDomain
from kernels.spec import ExecutionSpec
from kernels.tiles import TILE
from learner.config import LearnerConfig
from learner.families.architecture import Architecture
from learner.layout import Layout
from rl.preflight import activations
from rl.preflight.parameters import Held, count, held_by
from sampler.config import SamplerConfig

BYTES = {"float32": 4, "bfloat16": 2}
CONTEXT = 2**30  # of a GPU process: CUDA context, loaded kernels, workspaces of cuBLAS and NCCL; an allowance
_LOGITS_AT_ONCE = (
    5  # logits, scaled logits, their log-softmax, and in backward its gradient and that of the logits
)
_STRICT_LOGITS_AT_ONCE = 7  # the sum in FP64 before and after each of its two scales, and rounded

_FIXED_POINT = "weights in fixed point"

Parts = dict[str, int]


@dataclass(frozen=True)
class Memory:
    """What a rank holds all the time, and beside that while it works hardest, in bytes by purpose."""

    standing: Parts
    working: Parts

    @property
    def total(self) -> int:
        return sum(self.standing.values()) + sum(self.working.values())


@dataclass(frozen=True)
class ExpertBytes:
    """stored: what travels and is kept; derived: what a back end makes of it to compute with. Of all layers."""

    stored: int
    derived: int


def expert_bytes(
    model: Architecture,
    specs: PrecisionMap,
    backend: str,
    experts: int,
    *,
    compact: bool = False,
    layout: str = "auto",
) -> ExpertBytes:
    """Of `experts` experts in each layer of `specs`, on a machine whose back end for NVFP4 is `backend`. compact: as
    samplers have them laid out (`kernels.triton.layer.prepare`). layout: as `SamplerConfig.expert_layout`.
    """
    rows = layout == "rows"
    layouts = {spec: _layer_bytes(model, spec, backend, experts, compact, rows) for spec in set(specs.layers)}
    return ExpertBytes(
        sum(layouts[spec].stored for spec in specs.layers),
        sum(layouts[spec].derived for spec in specs.layers),
    )


def layer_backend(spec: ExecutionSpec, backend: str) -> str:
    """What computes a layer under `spec` on a machine whose back end for NVFP4 is `backend`."""
    return backend if backend == "reference" else gpu_backend(spec, native=backend == "triton_native")


def _layer_bytes(
    model: Architecture, spec: ExecutionSpec, backend: str, experts: int, compact: bool, rows: bool
) -> ExpertBytes:
    layout = expert_layout(experts, model.hidden, model.expert_ffn, spec)
    stored = sum(prod(shape) * dtype.itemsize for shape, dtype in layout.values())
    if spec.weight is None:
        return ExpertBytes(stored, 0)
    matrices = (
        (2 * model.expert_ffn, model.hidden),
        (model.hidden, model.expert_ffn),
    )  # features, elements of each
    computed_by = layer_backend(spec, backend)
    if computed_by == "reference":
        wide = spec.weight.block_scale_format is BlockScaleFormat.E8M0
        return ExpertBytes(stored, experts * sum((4 if wide else 2) * prod(matrix) for matrix in matrices))
    native = computed_by == "triton_native"
    # The other back ends take rows.
    own_layout = computed_by == "triton_emulated" and not rows
    tiles = own_layout and can_stand_in_tiles(model.hidden, model.expert_ffn, spec)
    of_rows = spec.weight.outer_domain is ScaleDomain.ROW
    derived = 0
    for features, width in matrices:
        derived += _laid_out(features * width, features % TILE or width % TILE, native, tiles, compact)
        derived += 0 if of_rows else 4 * features  # outer scales, repeated for every row
        if (
            spec.gradient is not None and not compact
        ):  # a learner's: the weights as the gradient multiplies them
            derived += 2 * features * width + 4 * width
    return ExpertBytes(stored, experts * derived)


def _laid_out(elements: int, ragged: object, native: bool, tiles: bool, compact: bool) -> int:
    """Of one expert's matrix, beside its outer scales and what is stored; see `kernels.triton.matrix.ExpertMatrix`. A
    native one reads the stored codes; stored tiles are read as they are. ragged: whether it does not fit tiles.
    """
    if native:
        return elements // 16
    if ragged:
        return 2 * elements
    return (0 if tiles else elements // 2 + elements // 16) + (0 if compact else 2 * elements)


def learner_memory(
    model: Architecture,
    specs: PrecisionMap,
    config: LearnerConfig,
    layout: Layout,
    *,
    backend: str,
    keeps_copy: bool = False,
) -> Memory:
    """Of the rank that holds most. specs: of the learner; keeps_copy: of what was sent last (`sync.keep`)."""
    stages = [
        _stage_memory(model, specs, config, layout, stage, backend, keeps_copy)
        for stage in range(layout.pipeline)
    ]
    return max(stages, key=lambda memory: memory.total)


def bare_learner_memory(
    model: Architecture, specs: PrecisionMap, config: LearnerConfig, largest: int, *, backend: str
) -> Memory:
    """Of a learner of one process by itself, whose largest micro-batch has `largest` tokens: what a measurement inside
    the process can be compared with, so without the GPU's context.
    """
    own = replace(config, micro_batch_tokens=largest)
    found = learner_memory(model, specs, own, Layout(), backend=backend)
    standing = {name: size for name, size in found.standing.items() if name != "GPU context"}
    return Memory(standing, found.working)


def _stage_memory(
    model: Architecture,
    specs: PrecisionMap,
    config: LearnerConfig,
    layout: Layout,
    stage: int,
    backend: str,
    keeps_copy: bool,
) -> Memory:
    held, size = held_by(model, layout, stage), BYTES[config.dtype]
    own = _own_layers(specs, layout, stage)
    local = model.experts // layout.expert
    experts = expert_bytes(model, own, backend, local)
    standing = {"weights": size * held.total, **optimizer_bytes(held, config, layout)}
    standing["quantised experts"] = experts.stored
    standing["experts decoded or laid out"] = experts.derived
    if specs.model is not None:
        last = stage == layout.pipeline - 1
        standing[_FIXED_POINT] = fixed_point_bytes(model, len(own.layers), output=last)
    if keeps_copy:
        standing["copy of what was sent"] = experts.stored + size * held.outside
    working = {
        "gradients": 4 * held.total,
        "activations": activations.saved_bytes(model, own, config, layout, stage),
        "backward of one layer": activations.backward_bytes(model, config, layout, backend),
        # Made in the parameter's type, then added in FP32.
        "gradient of a layer's experts": (size + 4 * (size < 4))
        * 2
        * local
        * model.hidden
        * model.expert_ffn,
    }
    if stage == layout.pipeline - 1:
        working["logits"] = logits_bytes(model, config, layout, strict=specs.model is not None)
    if config.device.startswith("cuda"):
        standing["GPU context"] = CONTEXT
    return Memory(standing, working)


def optimizer_bytes(held: Held, config: LearnerConfig, layout: Layout) -> Parts:
    """AdamW's two FP32 moments, and FP32 masters: of the slice that a rank has of what other ranks hold too
    (Rajbhandari et al. 2020, arXiv 1910.02054, stage 1). An FP32 parameter that no other rank holds is its own.
    """
    parts = ((held.outside, layout.data), (held.experts, layout.expert_copies))
    own = sum(-(-size // copies) for size, copies in parts)
    masters = sum(-(-size // copies) for size, copies in parts if copies > 1 or config.dtype != "float32")
    return {"FP32 masters": 4 * masters, "AdamW's moments": 8 * own}


def fixed_point_bytes(model: Architecture, layers: int, *, output: bool) -> int:
    """What strict products take in place of the weights of projections, routers and the output layer."""
    found = count(model)
    weights = layers * (found.layer.attention + found.layer.router)
    return 8 * (weights + (found.output or found.embedding) * output)


def logits_bytes(model: Architecture, config: LearnerConfig, layout: Layout, *, strict: bool = False) -> int:
    """Of one chunk of FP32 logits with what is made of it, and of the output layer in FP32 with its gradient."""
    vocab = model.vocab // layout.tensor
    rows = min(config.logits_bytes // (4 * vocab) or 1, config.micro_batch_tokens)
    widened = vocab * model.hidden * (8 if config.dtype != "float32" else 4)
    at_once = max(_LOGITS_AT_ONCE, _STRICT_LOGITS_AT_ONCE if strict else 0)
    return at_once * 4 * rows * vocab + widened


def _own_layers(specs: PrecisionMap, layout: Layout, stage: int) -> PrecisionMap:
    counts = [layout.layers_of(index, len(specs.layers)) for index in range(layout.pipeline)]
    start = sum(counts[:stage])
    return PrecisionMap(specs.layers[start : start + counts[stage]])


def sampler_memory(
    model: Architecture,
    specs: PrecisionMap,
    config: SamplerConfig,
    *,
    backend: str,
    gpu: bool,
    operands: bool = False,
) -> Memory:
    """Of one rank of a sampler, with its share of heads, vocabulary and experts. operands: whether experts travel
    before they are quantised (`sync.codec=bf16`).
    """
    found, size, tensor = count(model), BYTES[config.dtype], config.tensor_parallel
    outside = size * (
        (found.embedding + found.output + found.layers * found.layer.attention) // tensor
        + found.final_norm
        + found.layers * (found.layer.router + found.layer.norms)
    )
    experts = expert_bytes(
        model, specs, backend, model.experts // tensor, compact=True, layout=config.expert_layout
    )
    travelling = 2 * found.experts // tensor if operands else experts.stored
    standing = {
        "weights outside the experts": outside,
        "quantised experts": experts.stored,
        "experts decoded or laid out": experts.derived,
        "keys and values": int(config.kv_cache_gib * 2**30),
    }
    if specs.model is not None:
        standing[_FIXED_POINT] = fixed_point_bytes(model, model.layers, output=True)
    working = {
        "staged in a weight sync": outside + travelling,
        "activations": activations.forward_bytes(model, config),
    }
    if gpu:
        standing["GPU context"] = CONTEXT
    # A sync and a forward pass do not happen at once.
    largest = max(working, key=lambda name: working[name])
    return Memory(standing, {largest: working[largest]})


def cache_bytes_per_token(model: Architecture, config: SamplerConfig, tensor: int) -> int:
    """Keys and values of one token on one rank."""
    return 2 * model.layers * -(-model.kv_heads // tensor) * model.head_dim * BYTES[config.dtype]

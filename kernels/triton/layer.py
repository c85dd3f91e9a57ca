"""The expert layer in Triton kernels: `kernels.reference` and `kernels.autograd` with the same signatures.

    group slots -> permute and quantise -> FC1 -> SwiGLU and quantise -> FC2 -> weighted sum over the slots

Every step but the two products computes the reference's bits; the products sum along K in FP32 in the tensor core's
order, which depends on nothing but K. So a token's output has the same bits whatever shares its batch, by the product
of many rows or of few, in training or in generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from kernels.experts import ExpertWeights, StoredLayout
from kernels.guard import NonFiniteGuard
from kernels.packed_rows import PackedRows
from kernels.quantize import QuantizedTensor, stored_scales
from kernels.quantizer_spec import ScaleDomain
from kernels.spec import Backward, Epilogue, ExecutionSpec
from kernels.triton import ops
from kernels.triton import packed_rows as packing
from kernels.triton.backward import Saved, expert_gradients
from kernels.triton.matrix import ExpertMatrix
from kernels.triton.support import check_layer, check_quantizer
from kernels.triton.weights import quantize_weight


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """One version of a layer's expert weights as the kernels read them under `spec`."""

    spec: ExecutionSpec
    w13: ExpertMatrix  # [E, 2F, H]
    w2: ExpertMatrix  # [E, H, F]
    stored: frozenset[int]  # addresses of the stored tensors, of which some are read as they are

    def derived(self) -> dict[str, torch.Tensor]:
        """As `kernels.reference.PreparedExperts.derived`: no tensor that is stored itself."""
        parts = {"w13": self.w13.derived(), "w2": self.w2.derived()}
        made = {f"{name}.{part}": tensor for name, own in parts.items() for part, tensor in own.items()}
        return {name: tensor for name, tensor in made.items() if tensor.data_ptr() not in self.stored}


class Shaped(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


class Prepared(Protocol):
    """What a back end for GPUs makes of a layer's weights."""

    @property
    def spec(self) -> ExecutionSpec: ...

    @property
    def w13(self) -> Shaped: ...

    @property
    def w2(self) -> Shaped: ...


def check_spec(spec: ExecutionSpec) -> None:
    """Raises ValueError, naming the field, for a spec that the kernels do not compute."""
    check_layer(spec)
    for name, quantizer, domains in (
        ("activation", spec.activation, (ScaleDomain.TOKEN,)),
        ("weight", spec.weight, (ScaleDomain.ROW, ScaleDomain.EXPERT)),
    ):
        if quantizer is None:
            raise ValueError(f"the Triton layer does not compute {spec.name!r}: {name} is not quantised")
        check_quantizer(quantizer, domains)
    for field, found, computed in (
        ("epilogue", spec.epilogue, Epilogue.OUTER_PRODUCT_FIRST),
        ("backward", spec.backward, Backward.BF16_STRAIGHT_THROUGH),
    ):
        if found != computed:
            raise ValueError(
                f"the Triton layer does not compute {spec.name!r}: {field}={found}, computed is {computed}"
            )


def quantize(w13: torch.Tensor, w2: torch.Tensor, spec: ExecutionSpec) -> ExpertWeights:
    """As `ExpertWeights.quantize`, the same bytes. Waits for the device, to find values that are not finite."""
    check_spec(spec)
    assert spec.weight is not None
    experts, two_ffn, hidden = w13.shape
    if two_ffn % 2 or w2.shape != (experts, hidden, two_ffn // 2):
        found = f"{tuple(w13.shape)} and {tuple(w2.shape)}"
        raise ValueError(f"expert weights must be w13 [E, 2F, H] and w2 [E, H, F], got {found}")
    stored: dict[str, torch.Tensor] = {}
    for name, master in (("w13", w13), ("w2", w2)):
        quantized = quantize_weight(master.detach().bfloat16(), spec.weight, halves=name == "w13")
        scales = stored_scales(quantized, spec.weight)
        assert scales is not None and quantized.outer_scales is not None
        stored[f"{name}.codes"] = quantized.codes
        stored[f"{name}.block_scales"] = scales
        stored[f"{name}.outer_scales"] = quantized.outer_scales
    return ExpertWeights.from_tensors(stored, spec)


def prepare(
    weights: ExpertWeights, spec: ExecutionSpec, *, compact: bool = False, native: bool = False
) -> PreparedExperts:
    """Lay out `weights` for the native or the emulated products; the latter read weights in tiles as they are.

    compact: for the emulated ones, keep them in 4 bits alone, which products then read (very many rows decode them
    first, in every call). Raises ValueError when they were stored under a spec of another layout, and for a spec that
    the kernels do not compute.
    """
    check_spec(spec)
    weights = ExpertWeights.from_tensors(weights.tensors(), spec)
    w13, w2 = (_matrix(weights, name, native, compact) for name in ("w13", "w2"))
    return PreparedExperts(spec, w13, w2, frozenset(t.data_ptr() for t in weights.stored.values()))


def _matrix(weights: ExpertWeights, name: str, native: bool, compact: bool) -> ExpertMatrix:
    if weights.layout is StoredLayout.TILES and not native:
        parts = (weights.stored[f"{name}.{part}"] for part in ("words", "word_scales", "outer_scales"))
        return ExpertMatrix.of_tiles(*parts, compact=compact)
    matrix = weights.w13 if name == "w13" else weights.w2
    assert isinstance(matrix, QuantizedTensor)
    return ExpertMatrix.of(matrix, native=native, compact=compact)


def pack_rows(x: torch.Tensor, spec: ExecutionSpec) -> PackedRows:
    """As `kernels.reference.pack_rows`, the same bytes; for `forward` of the emulated products."""
    check_spec(spec)
    assert spec.activation is not None
    return packing.pack_rows(x.detach().to(torch.bfloat16), spec.activation)


def forward(
    x: torch.Tensor | PackedRows,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    prepared: PreparedExperts,
    spec: ExecutionSpec,
    guard: NonFiniteGuard | None = None,
) -> torch.Tensor:
    """As `kernels.reference.forward`: the layer's output, bfloat16 [T, H].

    With a guard nothing waits for the device, and expert ids are not checked: a slot whose id does not exist makes its
    token's output NaN. Without one, values that are not finite and such ids raise ValueError. x packed: not with
    weights for the native products (ValueError), nor in `torch.compile`.
    """
    check_inputs(x, topk_ids, topk_weights, prepared, spec)
    check_ids(topk_ids, prepared.w13.shape[0], guard)
    bad = _counts(prepared, guard)
    if isinstance(x, PackedRows):
        if prepared.w13.native:
            raise ValueError("the native products do not take rows that were packed before they were grouped")
        output = ops.run_experts(x, topk_ids, topk_weights.detach(), prepared.w13, prepared.w2, bad)
        _report(bad, guard)
        return output
    inputs = x.detach().to(torch.bfloat16), topk_ids, topk_weights.detach()
    if torch.compiler.is_compiling():
        output, found = ops.experts(*inputs, prepared.w13.tensors(), prepared.w2.tensors())
        bad += found
    else:
        output = ops.run_experts(*inputs, prepared.w13, prepared.w2, bad)
    _report(bad, guard)
    return output


def expert_layer(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    prepared: PreparedExperts,
    spec: ExecutionSpec,
    *,
    guard: NonFiniteGuard | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """As `kernels.autograd.expert_layer`: the output [T, H] in x.dtype, differentiable in x, topk_weights, w13 and w2.

    seed is not used: nothing here rounds stochastically. guard: as in `forward`. Gradients of FP32 master weights are
    FP32 sums; those of BF16 ones are rounded to BF16 once.
    """
    check_inputs(x, topk_ids, topk_weights, prepared, spec)
    check_masters(w13, w2, prepared)
    if not needs_gradient(x, topk_weights, w13, w2):
        return forward(x, topk_ids, topk_weights, prepared, spec, guard).to(x.dtype)
    check_ids(topk_ids, prepared.w13.shape[0], guard)
    inputs = x, topk_ids, topk_weights, w13, w2
    bad = _counts(prepared, guard)
    if torch.compiler.is_compiling():
        output, *_, found = ops.experts_for_gradient(*inputs, prepared.w13.tensors(), prepared.w2.tensors())
        bad += found
    else:
        output = _ExpertLayer.apply(*inputs, prepared, bad)
    _report(bad, guard)
    return output


class _ExpertLayer(torch.autograd.Function):
    """The operator `experts_for_gradient` and its backward, without the dispatcher's time on the host."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        prepared: PreparedExperts,
        bad: torch.Tensor,
    ) -> torch.Tensor:
        output, *saved = ops.run_experts_for_gradient(
            x, topk_ids, topk_weights, prepared.w13, prepared.w2, bad
        )
        # The masters are kept by reference and cast again in backward: a BF16 copy of them would cost memory.
        ctx.save_for_backward(topk_weights, w13, w2, *saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides parameter names
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        topk_weights, w13, w2, *saved = ctx.saved_tensors
        found = expert_gradients(
            grad_outputs[0], topk_weights, w13, w2, Saved(*saved[:4]), ops.groups_of(saved[4:])
        )
        return found.x, None, found.topk_weights, found.w13, found.w2, None, None


def needs_gradient(*inputs: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(own.requires_grad for own in inputs)


def check_masters(w13: torch.Tensor, w2: torch.Tensor, prepared: Prepared) -> None:
    """Raises ValueError for master weights of other shapes than what was prepared."""
    for name, master, matrix in (("w13", w13, prepared.w13), ("w2", w2, prepared.w2)):
        if tuple(master.shape) != tuple(matrix.shape):
            raise ValueError(
                f"{name} must be {tuple(matrix.shape)} as it was prepared, got {tuple(master.shape)}"
            )


def check_inputs(
    x: torch.Tensor | PackedRows,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    prepared: Prepared,
    spec: ExecutionSpec,
) -> None:
    """Raises ValueError for shapes or dtypes that do not fit, and for `prepared` of another spec."""
    if prepared.spec != spec:
        raise ValueError(
            f"experts were prepared under {prepared.spec.name!r}, the call asks for {spec.name!r}"
        )
    hidden = prepared.w13.shape[2]
    kind = torch.bfloat16 if isinstance(x, PackedRows) else x.dtype
    if len(x.shape) != 2 or x.shape[1] != hidden or kind not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x must be bfloat16 or float32 [T, {hidden}], got {kind} {tuple(x.shape)}")
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0] or topk_ids.shape[1] == 0:
        raise ValueError(f"topk_ids must be [{x.shape[0]}, k] with k >= 1, got {tuple(topk_ids.shape)}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
    if topk_weights.shape != topk_ids.shape or topk_weights.dtype != torch.float32:
        found = f"{topk_weights.dtype} {tuple(topk_weights.shape)}"
        raise ValueError(f"topk_weights must be float32 {tuple(topk_ids.shape)}, got {found}")


def check_ids(topk_ids: torch.Tensor, experts: int, guard: NonFiniteGuard | None) -> None:
    """Raises ValueError for ids of experts that do not exist. Waits for the device, so only where the caller waits
    anyway: without a guard.
    """
    if guard is not None or not topk_ids.numel():
        return
    low, high = torch.stack(torch.aminmax(topk_ids)).tolist()
    if low < 0 or high >= experts:
        raise ValueError(f"expert ids must be in [0, {experts}), got values in [{low}, {high}]")


def _counts(prepared: PreparedExperts, guard: NonFiniteGuard | None) -> torch.Tensor:
    """int64 [2, E], where rows that are not finite are counted: the guard's, if there is one."""
    if guard is None:
        return ops.no_bad_rows(prepared.w13)
    return guard.input_counts(prepared.w13.outer.device)


def _report(bad: torch.Tensor, guard: NonFiniteGuard | None) -> None:
    """Without a guard: wait for the device, and raise ValueError if rows were counted."""
    if guard is None:
        own = NonFiniteGuard(0, bad.shape[1])
        own.input_counts(bad.device).copy_(bad)
        own.check()

"""The weights of one layer's experts as a spec stores them, and as they travel from learner to sampler."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from kernels.quantize import QuantizedTensor, logical_scales, quantize_weight, stored_scales
from kernels.quantizer_spec import Block, CodeLayout, QuantizerSpec, ScaleDomain, ScaleLayout
from kernels.spec import ExecutionSpec, FloatType
from kernels.swizzle import swizzled_size
from kernels.tiles import SCALES, TILE, WORDS, from_tiles, to_tiles

_WIRE_NAME = re.compile(r"model\.layers\.(\d+)\.experts\.(.+)")
TORCH_TYPE = {FloatType.BF16: torch.bfloat16, FloatType.FP32: torch.float32}
WeightQuantizer = Callable[..., QuantizedTensor]
_BLOCK_SHAPE = {
    Block.ROW_16: (1, 16),
    Block.ROW_32: (1, 32),
    Block.TILE_16: (16, 16),
}  # rows, elements along K
_MATRICES = ("w13", "w2")
OPERANDS = ("w13.weight", "w2.weight")  # parts, before they are quantised: see `operand_layout`


class StoredLayout(StrEnum):
    """In which order 4-bit weights are kept and sent. The numbers are the same; see `ExpertWeights.in_layout`."""

    ROWS = "rows"  # as the spec says: codes by feature, block scales linear or swizzled
    TILES = "tiles"  # as `kernels.tiles` says: what products on 16-bit tensor cores read


def wire_name(layer: int, part: str) -> str:
    """The name under which part `part` (a key of `ExpertWeights.tensors`) of layer `layer` travels."""
    return f"model.layers.{layer}.experts.{part}"


def derived_name(layer: int, part: str) -> str:
    """The name of what an engine derives from a layer's stored tensors, a key of `PreparedExperts.derived`."""
    return wire_name(layer, f"derived.{part}")


def split_wire_name(name: str) -> tuple[int, str] | None:
    """The inverse of `wire_name`; None for a name that is not one of an expert tensor."""
    match = _WIRE_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """E experts: FC1 `w13` [E, 2F, H] (F gate rows, then F up rows) and FC2 `w2` [E, H, F].

    stored: what is kept and sent. For each matrix either `w13.weight`, a tensor of the spec's operand type, or
    `w13.codes`, `w13.block_scales` (in the spec's order in memory; absent without blocks) and `w13.outer_scales`
    (absent without outer scales). In tiles, `w13.words` and `w13.word_scales` stand for codes and block scales.
    """

    stored: Mapping[str, torch.Tensor]
    spec: ExecutionSpec

    @classmethod
    def quantize(
        cls,
        w13: torch.Tensor,
        w2: torch.Tensor,
        spec: ExecutionSpec,
        quantizer: WeightQuantizer = quantize_weight,
    ) -> ExpertWeights:
        """A snapshot of the master weights (BF16 or FP32, shapes as above) under `spec`.

        quantizer: does what `kernels.quantize.quantize_weight` does. Raises ValueError for shapes that do not fit each
        other and for weights that the quantiser refuses.
        """
        experts, two_ffn, hidden = w13.shape
        if two_ffn % 2 or w2.shape != (experts, hidden, two_ffn // 2):
            found = f"{tuple(w13.shape)} and {tuple(w2.shape)}"
            raise ValueError(f"expert weights must be w13 [E, 2F, H] and w2 [E, H, F], got {found}")
        stored: dict[str, torch.Tensor] = {}
        for name, master in zip(_MATRICES, (w13, w2), strict=True):
            operand = master.detach().to(TORCH_TYPE[spec.operand], copy=spec.weight is None)
            if spec.weight is None:
                stored[f"{name}.weight"] = operand
                continue
            quantized = quantizer(operand, spec.weight, halves=name == "w13")
            parts = {
                "codes": quantized.codes,
                "block_scales": stored_scales(quantized, spec.weight),
                "outer_scales": quantized.outer_scales,
            }
            stored |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
        return cls(stored, spec)

    @classmethod
    def empty(
        cls,
        num_experts: int,
        hidden: int,
        ffn: int,
        spec: ExecutionSpec,
        device: torch.device | str = "cpu",
        layout: StoredLayout = StoredLayout.ROWS,
    ) -> ExpertWeights:
        """Tensors of the right names, dtypes and shapes, all zero, to be filled."""
        entries = expert_layout(num_experts, hidden, ffn, spec, layout).items()
        stored = {key: torch.zeros(shape, dtype=dtype, device=device) for key, (shape, dtype) in entries}
        return cls(stored, spec)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], spec: ExecutionSpec) -> ExpertWeights:
        """The inverse of `tensors()`, of either layout.

        Raises ValueError for names, dtypes or shapes that are not those of `spec` or do not fit each other.
        """
        order = _layout_of(tensors, spec)
        widest = "w13.weight" if spec.weight is None else "w13.codes"
        widest = "w13.words" if order is StoredLayout.TILES else widest
        if widest not in tensors or tensors[widest].dim() != (3 if order is StoredLayout.ROWS else 4):
            raise ValueError(f"experts under {spec.name!r} need {widest} [E, 2F, *], got {sorted(tensors)}")
        experts, two_ffn, hidden = _elements_shape(tuple(tensors[widest].shape), spec)
        layout = expert_layout(experts, hidden, two_ffn // 2, spec, order)
        problems = [f"{key} is unknown" for key in sorted(tensors.keys() - layout.keys())]
        for key, (shape, dtype) in layout.items():
            if key not in tensors:
                problems.append(f"{key} is missing")
            elif tensors[key].dtype != dtype or tuple(tensors[key].shape) != shape:
                found = f"{tensors[key].dtype} {tuple(tensors[key].shape)}"
                problems.append(f"{key} is {found}, expected {dtype} {shape}")
        if problems:
            raise ValueError(
                f"expert weights do not fit execution spec {spec.name!r}: " + "; ".join(problems)
            )
        return cls({key: tensors[key] for key in layout}, spec)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The stored tensors themselves, in a fixed order."""
        return dict(self.stored)

    @property
    def layout(self) -> StoredLayout:
        return _layout_of(self.stored, self.spec)

    def in_layout(self, layout: StoredLayout) -> ExpertWeights:
        """The same weights in another order, bit for bit, there and back; themselves where they stand in it.

        Weights that `can_stand_in_tiles` refuses are in rows whatever is asked for.
        """
        if layout is self.layout or (layout is StoredLayout.TILES and not self._fits_tiles()):
            return self
        assert self.spec.weight is not None
        stored: dict[str, torch.Tensor] = {}
        for name in _MATRICES:
            matrix = self._matrix(name)
            assert isinstance(matrix, QuantizedTensor) and matrix.block_scales is not None
            if layout is StoredLayout.TILES:
                words, scales = _to_tiles(matrix.codes, matrix.block_scales)
                stored |= {f"{name}.words": words, f"{name}.word_scales": scales}
            else:
                in_order = stored_scales(matrix, self.spec.weight)
                assert in_order is not None
                stored |= {f"{name}.codes": matrix.codes, f"{name}.block_scales": in_order}
            if matrix.outer_scales is not None:
                stored[f"{name}.outer_scales"] = matrix.outer_scales
        return ExpertWeights(stored, self.spec)

    def _fits_tiles(self) -> bool:
        if self.spec.weight is None:
            return False
        _, two_ffn, hidden = _elements_shape(tuple(self.stored["w13.codes"].shape), self.spec)
        return can_stand_in_tiles(hidden, two_ffn // 2, self.spec)

    @property
    def w13(self) -> QuantizedTensor | torch.Tensor:
        """FC1, with codes and block scales in the order of the elements: the stored tensors where that is theirs."""
        return self._matrix("w13")

    @property
    def w2(self) -> QuantizedTensor | torch.Tensor:
        """FC2, as `w13`."""
        return self._matrix("w2")

    def _matrix(self, name: str) -> QuantizedTensor | torch.Tensor:
        quantizer = self.spec.weight
        if quantizer is None:
            return self.stored[f"{name}.weight"]
        if f"{name}.words" in self.stored:
            in_rows = from_tiles(self.stored[f"{name}.words"], self.stored[f"{name}.word_scales"])
            return QuantizedTensor(*in_rows, self.stored.get(f"{name}.outer_scales"))
        codes, scales = self.stored[f"{name}.codes"], self.stored.get(f"{name}.block_scales")
        if scales is not None:
            rows, width = codes.shape[1], codes.shape[2] * _codes_per_byte(quantizer)
            scales = logical_scales(scales, quantizer, rows, width)
        return QuantizedTensor(codes, scales, self.stored.get(f"{name}.outer_scales"))


def operand_layout(
    stored: Mapping[str, tuple[int, ...]], spec: ExecutionSpec
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes of the stored tensors, in either layout -> shape and dtype of what they are made of, `w13.weight` and
    `w2.weight`.
    """
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in _MATRICES:
        widest = next(
            stored[key] for part in ("weight", "codes", "words") if (key := f"{name}.{part}") in stored
        )
        shapes[f"{name}.weight"] = (_elements_shape(widest, spec), TORCH_TYPE[spec.operand])
    return shapes


def can_stand_in_tiles(hidden: int, ffn: int, spec: ExecutionSpec) -> bool:
    """Whether a layer's weights under `spec` have a tile layout: 4-bit codes in blocks of 1x16, and widths that are
    multiples of 128.
    """
    quantizer = spec.weight
    packed = quantizer is not None and _codes_per_byte(quantizer) == 2 and quantizer.block is Block.ROW_16
    return packed and hidden % TILE == 0 and ffn % TILE == 0


def _layout_of(stored: Mapping[str, object], spec: ExecutionSpec) -> StoredLayout:
    tiles = spec.weight is not None and "w13.words" in stored
    return StoredLayout.TILES if tiles else StoredLayout.ROWS


def _elements_shape(widest: tuple[int, ...], spec: ExecutionSpec) -> tuple[int, int, int]:
    """The shape of a matrix [E, N, K] from that of its weights, codes or words."""
    if len(widest) == 4:
        return widest[0], widest[1] * TILE, widest[2] * TILE
    experts, rows, width = widest
    return experts, rows, width * _codes_per_byte(spec.weight)


def _to_tiles(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.tiles.to_tiles`; on a GPU in one pass over memory."""
    if not codes.is_cuda:
        return to_tiles(codes, scales)
    from kernels.triton.tiles import tiles_of

    experts, features, half = codes.shape
    words, word_scales = tiles_of(codes.contiguous(), scales.contiguous(), (experts, features, 2 * half))
    grid = (experts, features // TILE, 2 * half // TILE)
    return words.view(*grid, WORDS), word_scales.view(*grid, SCALES)


def _codes_per_byte(quantizer: QuantizerSpec | None) -> int:
    return 2 if quantizer is not None and quantizer.code_layout is CodeLayout.EVEN_LOW else 1


def expert_layout(
    experts: int, hidden: int, ffn: int, spec: ExecutionSpec, order: StoredLayout = StoredLayout.ROWS
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every stored tensor, in the order of `ExpertWeights.tensors`; of weights that cannot stand in
    tiles, in rows. Raises ValueError for widths that the spec cannot hold.
    """
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    tiles = order is StoredLayout.TILES and can_stand_in_tiles(hidden, ffn, spec)
    for name, rows, width in (("w13", 2 * ffn, hidden), ("w2", hidden, ffn)):
        if width == 0 or width % spec.width_multiple:
            expected = f"rows of a positive multiple of {spec.width_multiple} elements"
            raise ValueError(f"{name} under {spec.name!r} must have {expected}, got {width}")
        if spec.weight is None:
            layout[f"{name}.weight"] = ((experts, rows, width), TORCH_TYPE[spec.operand])
            continue
        if tiles:
            grid = (experts, rows // TILE, width // TILE)
            layout[f"{name}.words"] = ((*grid, WORDS), torch.int32)
            layout[f"{name}.word_scales"] = ((*grid, SCALES), torch.uint8)
        else:
            layout[f"{name}.codes"] = ((experts, rows, width // _codes_per_byte(spec.weight)), torch.uint8)
        if spec.weight.block is not Block.NONE and not tiles:
            layout[f"{name}.block_scales"] = (_scales_shape(experts, rows, width, spec.weight), torch.uint8)
        if spec.weight.outer_domain is not ScaleDomain.NONE:
            halves = 2 if name == "w13" else 1
            outer = {ScaleDomain.ROW: rows, ScaleDomain.EXPERT: 1, ScaleDomain.EXPERT_HALF: halves}
            layout[f"{name}.outer_scales"] = ((experts, outer[spec.weight.outer_domain]), torch.float32)
    return layout


def _scales_shape(experts: int, rows: int, width: int, quantizer: QuantizerSpec) -> tuple[int, ...]:
    block_rows, block_width = _BLOCK_SHAPE[quantizer.block]
    if quantizer.scale_layout is ScaleLayout.SWIZZLED_128X4:
        return (experts, swizzled_size(rows, width // block_width))  # a scale for every row
    return (experts, -(-rows // block_rows), width // block_width)

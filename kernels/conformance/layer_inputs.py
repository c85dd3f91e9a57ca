"""Expert layers whose output shows one choice of the spec each, for the oracle and for a back end.

Weights are the oracle's bytes, so that a layer check says nothing about the weight quantiser. Numbers have few
significant bits where it can be helped: their sums along K are then FP32 numbers in every order, and one output
is right even where the spec leaves the order open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kernels.conformance import oracle
from kernels.conformance.formula import bf16, fp32
from kernels.conformance.inputs import SEED
from kernels.conformance.oracle_layer import Layer, Operand, matrix_operand, quantize_matrix
from kernels.experts import TORCH_TYPE, ExpertWeights
from kernels.quantizer_spec import Block, BlockScaleFormat, QuantizerSpec, ScaleDomain
from kernels.spec import ExecutionSpec


@dataclass(frozen=True)
class Case:
    """x [T, H], ids [T, k], p [T, k] (FP32 values), w13 [E, 2F, H], w2 [E, H, F], all float64 but ids.

    w2_bytes: FC2's weights as bytes, an expert each, in the place of w2. Weights do not change once used.
    """

    x: np.ndarray
    ids: np.ndarray
    p: np.ndarray
    w13: np.ndarray
    w2: np.ndarray
    w2_bytes: list[oracle.Expected] | None = None
    _quantised: dict[tuple[str, QuantizerSpec], list[list[oracle.Expected]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def layer(self, spec: ExecutionSpec) -> Layer:
        """What the oracle takes."""
        w13, w2 = (
            [Operand(matrix) for matrix in weight]
            if spec.weight is None
            else [matrix_operand(parts) for parts in self._parts(name, spec.weight)]
            for name, weight in (("w13", self.w13), ("w2", self.w2))
        )
        return Layer(self.x, self.ids, self.p, w13, w2)

    def weights(self, spec: ExecutionSpec, device: torch.device) -> ExpertWeights:
        """What a back end takes: the same bytes."""
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in (("w13", self.w13), ("w2", self.w2)):
            if spec.weight is None:
                tensors[f"{name}.weight"] = torch.from_numpy(weight).to(TORCH_TYPE[spec.operand])
                continue
            experts = [_stored(parts, spec.weight) for parts in self._parts(name, spec.weight)]
            tensors |= {
                f"{name}.{part}": torch.from_numpy(np.stack([expert[part] for expert in experts]))
                for part in experts[0]
            }
        return ExpertWeights.from_tensors({key: value.to(device) for key, value in tensors.items()}, spec)

    def _parts(self, name: str, spec: QuantizerSpec) -> list[list[oracle.Expected]]:
        """The oracle's bytes of every expert."""
        if name == "w2" and self.w2_bytes is not None:
            return [[expert] for expert in self.w2_bytes]
        if (name, spec) not in self._quantised:
            weight, halves = (self.w13, True) if name == "w13" else (self.w2, False)
            parts = [quantize_matrix(matrix, spec, halves=halves) for matrix in weight]
            self._quantised[name, spec] = parts
        return self._quantised[name, spec]

    def arguments(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.from_numpy(self.x).to(torch.bfloat16)
        return (
            x.to(device),
            torch.from_numpy(self.ids).to(device),
            torch.from_numpy(self.p).float().to(device),
        )

    def tokens(self, index: np.ndarray | slice) -> Case:
        return replace(self, x=self.x[index], ids=self.ids[index], p=self.p[index])


def _stored(parts: Sequence[oracle.Expected], spec: QuantizerSpec) -> dict[str, np.ndarray]:
    """An expert's bytes as they are stored: codes [N, *], block scales, outer scales [1, 2 or N]."""
    stored = {"codes": np.concatenate([part.stored_codes(spec) for part in parts])}
    scales = [part.block_scales for part in parts if part.block_scales is not None]
    if scales:
        stored["block_scales"] = oracle.stored_scales(np.concatenate(scales), spec, len(stored["codes"]))
    outer = [part.stored_outer(spec) for part in parts]
    found = [own for own in outer if own is not None]
    if found:
        stored["outer_scales"] = np.concatenate(found)[:, 0].astype(np.float32)
    return stored


def short(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers of four significant bits in three binades around 1."""
    return (
        rng.choice([-1.0, 1.0], shape)
        * (1 + rng.integers(0, 8, shape) / 8)
        * 2.0 ** rng.integers(-1, 2, shape)
    )


def coefficients(rng: np.random.Generator, tokens: int, top_k: int) -> np.ndarray:
    """FP32 router coefficients that BF16 does not hold."""
    p = rng.random((tokens, top_k)) + 0.1
    return fp32(p / p.sum(1, keepdims=True))


def random_case(
    tokens: int, hidden: int, ffn: int, experts: int, top_k: int, seed: int = 0, ids: np.ndarray | None = None
) -> Case:
    """Rows of different size; weights near 1/sqrt(K)."""
    rng = np.random.default_rng(SEED + seed)
    if ids is None:
        ids = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :top_k]
    x = short(rng, tokens, hidden) * 2.0 ** rng.integers(-3, 2, (tokens, 1))
    w13 = short(rng, experts, 2 * ffn, hidden) * 2.0 ** -np.round(np.log2(hidden) / 2 + 1)
    w2 = short(rng, experts, hidden, ffn) * 2.0 ** -np.round(np.log2(ffn) / 2 + 1)
    return Case(x, np.ascontiguousarray(ids), coefficients(rng, tokens, ids.shape[1]), w13, w2)


def lone(case: Case) -> Case:
    """The same with one feature between FC1 and FC2. A lone element of a row is quantised to almost its own value, so
    that all roundings behind FC1 stay visible in the output.
    """
    w13 = case.w13.copy()
    half = w13.shape[1] // 2
    w13[:, 1:half] = 0
    w13[:, half + 1 :] = 0
    return replace(case, w13=w13)


def midpoint_case(width: int) -> Case:
    """Every token has an expert of its own, and its FC2 product is a midpoint between two BF16 numbers before the outer
    scales enter: their last bits decide.
    """
    significand = 1 + np.arange(128) / 128
    squares = bf16(significand**2)
    products = squares[:, None] * significand[None]
    unit = np.ldexp(1.0, np.frexp(products)[1] - 8)
    tie = np.argwhere(products / unit % 1 == 0.5)
    m, n = tie[np.random.default_rng(SEED).permutation(len(tie))[:48]].T
    x = np.zeros((48, 2 * width))
    # gate is the row's largest, and up 1/64 of it: both are quantised to (almost) their own values.
    x[:, 0], x[:, width] = 64 * significand[m], significand[m]
    w13 = np.zeros((48, 2 * width, 2 * width))
    w13[:, 0, 0] = w13[:, width, width] = 1
    w2 = np.zeros((48, 2 * width, width))
    w2[:, :, 0] = significand[n][:, None]
    return Case(x, np.arange(48)[:, None], np.ones((48, 1)), w13, w2)


def cancelling_case(width: int, top_k: int = 4, tokens: int = 24) -> Case:
    """A token's expert outputs nearly cancel, in an order of experts that is not the slots': the order of the sum and
    each rounding in it shows.
    """
    case = lone(random_case(tokens, width, width, top_k, top_k, seed=31))
    size = np.where(np.arange(top_k) % 2, -1.0, 1.0) * 2.0 ** -(np.arange(top_k) // 2 * 9.0)
    p = case.p[:, :1] * (1 + np.arange(top_k) * 2.0**-20)
    w13, w2 = np.repeat(case.w13[:1], top_k, 0), np.repeat(case.w2[:1], top_k, 0)
    return replace(case, w13=w13, w2=w2 * size[:, None, None], p=fp32(p))


def every_code(spec: ExecutionSpec) -> Case:
    """FC2 products of every pair of element codes: activation rows (E, c, 0, ...), weight rows (0, d, E, ...)."""
    assert spec.activation is not None and spec.weight is not None
    width = 32
    values = [oracle.VALUES[q.element] for q in (spec.activation, spec.weight)]
    left, right = (np.concatenate([v, -v]) for v in values)
    # The activation reaches FC2 as silu(64) * up = 64 * up; gate and up stand in blocks of their own.
    x = np.zeros((len(left), max(-(-len(right) // width), 2) * width))
    x[:, 0], x[:, width], x[:, width + 1] = 64, values[0][-1], left
    w13 = np.zeros((1, 2 * width, x.shape[1]))
    w13[0, :2, 0] = 1
    w13[0, width, width] = w13[0, width + 1, width + 1] = 1
    w2 = np.zeros((1, x.shape[1], width))
    w2[0, : len(right), 1] = right
    w2[0, : len(right), 2] = values[1][-1]
    return Case(x, np.zeros((len(x), 1), np.int64), np.ones((len(x), 1)), w13, w2)


def every_weight_byte(spec: ExecutionSpec) -> Case:
    """FC2 weights made of every element code and every block scale byte, each multiplied alone."""
    assert spec.weight is not None
    width, hidden = 32, 160
    x = np.zeros((width, hidden))
    x[:, 0] = 64
    x[:, width : 2 * width] = np.eye(width)
    w13 = np.zeros((1, 2 * width, hidden))
    w13[0, :width, 0] = 1
    w13[0, width:, width : 2 * width] = np.eye(width)
    ids, p = np.zeros((width, 1), np.int64), np.ones((width, 1))
    return Case(x, ids, p, w13, np.zeros((1, hidden, width)), [_every_byte(spec.weight, hidden, width)])


def _every_byte(spec: QuantizerSpec, rows: int, width: int) -> oracle.Expected:
    """[rows, width] with codes and scale bytes in a row, outer scales 1."""
    magnitudes = len(oracle.VALUES[spec.element])
    legal = np.concatenate([np.arange(magnitudes), oracle.SIGN[spec.element] + np.arange(magnitudes)])
    places = np.arange(rows)[:, None] * (1 if magnitudes < width else width) + np.arange(width)
    codes = legal[places % len(legal)].astype(np.uint8)
    values, scales = oracle.decode_codes(codes, spec), None
    defined = np.zeros(codes.shape, bool)
    if spec.block is not Block.NONE:
        height, block = oracle.BLOCK_SHAPE[spec.block]
        e4m3 = spec.block_scale_format is BlockScaleFormat.E4M3
        lowest, count = (0, 127) if e4m3 else (127 - 40, 81)  # 2^-40 to 2^40: products stay within FP32
        down = -(-rows // height)
        spread = np.linspace(0, count, down, endpoint=False) if down < count else np.arange(down)
        scales = np.broadcast_to((lowest + spread % count)[:, None], (down, width // block)).astype(np.uint8)
        values = values * oracle.per_element(oracle.decode_scales(scales, spec), spec, codes.shape)
    if spec.outer_domain is ScaleDomain.NONE:
        return oracle.Expected(codes, scales, None, None, None, values, defined)
    largest = oracle.VALUES[spec.element][-1] * (spec.block_scale_max or 1)
    one = np.ones((rows if spec.outer_domain is ScaleDomain.ROW else 1, 1))
    return oracle.Expected(codes, scales, largest * one, one, one, values, defined)

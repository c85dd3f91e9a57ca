"""Inputs on which implementations of quantisers part: float64 arrays [R, K] that hold BF16 values.

Scales are multiples of the format's own numbers where a check is about rounding, so that quotients come out exact
and lie on the midpoints that they are meant to lie on.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kernels.conformance import oracle
from kernels.conformance.formula import bf16
from kernels.quantizer_spec import Block, BlockScaleFormat, QuantizerSpec, ScaleDomain

SEED = 20260801
BF16_LARGEST = float.fromhex("0x1.fep127")


def random(rows: int, width: int, seed: int = 0) -> np.ndarray:
    return bf16(np.random.default_rng(SEED + seed).standard_normal((rows, width)))


def heavy_tailed(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Magnitudes over many binades within a row, rows of very different size."""
    rng = np.random.default_rng(SEED + seed)
    size = np.exp(2.5 * rng.standard_normal((rows, width)) + 4 * rng.standard_normal((rows, 1)))
    return bf16(rng.standard_normal((rows, width)) * size)


def block_width(spec: QuantizerSpec) -> int:
    return 16 if spec.block is Block.NONE else oracle.BLOCK_SHAPE[spec.block][1]


def neighbours(values: np.ndarray) -> np.ndarray:
    """Each positive BF16 value with the BF16 values below and above it."""
    step = np.ldexp(1.0, np.frexp(values)[1] - 8)
    return np.stack([values - step, values, values + step], -1).ravel()


def from_blocks(blocks: Iterable[np.ndarray], spec: QuantizerSpec, per_row: int = 8) -> np.ndarray:
    """Rows of `per_row` blocks behind one that holds M alone, so that g = S = 1 where A aims at M. Short of blocks, the
    last row ends in zeros. Under 16x16 blocks a row stands in 16 equal ones.
    """
    width = block_width(spec)
    largest = oracle.VALUES[spec.element][-1] * (spec.block_scale_max or 1)
    found = list(blocks)
    found += [np.zeros(width)] * (-len(found) % per_row)
    head = np.zeros(width)
    head[0] = largest
    rows = [np.concatenate([head, *found[i : i + per_row]]) for i in range(0, len(found), per_row)]
    return np.array(rows).repeat(16 if spec.block is Block.TILE_16 else 1, 0)


def element_midpoints(spec: QuantizerSpec) -> np.ndarray:
    """Every midpoint between two elements and its BF16 neighbours, with both signs, under several block scales."""
    values, width = oracle.VALUES[spec.element], block_width(spec)
    middle = neighbours((values[1:] + values[:-1]) / 2)
    middle = np.concatenate([middle, -middle])
    scales = (1.0, 0.5, 4.0, 1.5) if spec.block_scale_format is BlockScaleFormat.E4M3 else (1.0, 0.5, 4.0)
    blocks = []
    for scale in (1.0,) if spec.block is Block.NONE else scales:
        for start in range(0, len(middle), width - 1):
            part = middle[start : start + width - 1]
            block = np.concatenate([[values[-1]], part, np.zeros(width - 1 - len(part))])
            blocks.append(bf16(block * scale))
    return from_blocks(blocks, spec)


def largest_in_block(maxima: np.ndarray, spec: QuantizerSpec) -> np.ndarray:
    """Blocks of these largest magnitudes, whose other elements are fractions of it."""
    fractions = np.linspace(-1, 1, block_width(spec) - 1)
    return from_blocks([bf16(np.append(a, a * fractions)) for a in maxima], spec)


def scale_maxima(spec: QuantizerSpec) -> np.ndarray:
    """Largest magnitudes that ask for every finite positive block scale of the format."""
    largest = oracle.VALUES[spec.element][-1]
    if spec.block_scale_format is BlockScaleFormat.E4M3:
        return bf16(largest * oracle.E4M3[1:])
    maxima = largest * np.ldexp(1.0, np.arange(-127, 120))
    return maxima[maxima <= BF16_LARGEST]


def scale_midpoints(spec: QuantizerSpec) -> np.ndarray:
    """Largest magnitudes halfway between two block scales (E8M0: where the power changes), and their neighbours."""
    if spec.block_scale_format is BlockScaleFormat.E4M3:
        largest = oracle.VALUES[spec.element][-1]
        return neighbours(bf16(largest * (oracle.E4M3[2:-1] + oracle.E4M3[1:-2]) / 2))
    significand = oracle.VALUES[spec.element][-1]
    powers = np.ldexp(1.0, np.arange(-100, 100, 7))
    return neighbours(np.concatenate([powers, powers * significand]))


def significands(exponents: Iterable[int]) -> np.ndarray:
    """Every BF16 significand, at these exponents."""
    return np.concatenate([np.ldexp(1 + np.arange(128) / 128, e) for e in exponents])


def with_largest(maxima: np.ndarray, width: int) -> np.ndarray:
    """A row for each largest magnitude."""
    shape = random(len(maxima), width, seed=7)
    shape = shape / np.abs(shape).max(1, keepdims=True) * 0.99
    rows = bf16(shape * maxima[:, None])
    rows[:, width // 2] = maxima
    return rows


def one_element(width: int) -> np.ndarray:
    """Row i is zero but for element i, of a size and sign of its own."""
    return np.diag(np.where(np.arange(width) % 3 == 0, -1.0, 1.0) * (1 + np.arange(width) % 7))


def separate(x: np.ndarray, spec: QuantizerSpec) -> list[np.ndarray]:
    """Calls in which every row of x has an outer scale of its own."""
    shared = spec.outer_domain in oracle.SHARED_DOMAINS
    return [row[None] for row in x] if shared else [x]


def tail_widths(spec: QuantizerSpec) -> list[int]:
    """K that end inside any tile of a kernel: 1, 3, 5 and 7 blocks."""
    return [block_width(spec) * count for count in (1, 3, 5, 7)]


def shares_rows(spec: QuantizerSpec) -> str:
    """Why a row's bytes depend on other rows; empty when they do not."""
    if spec.outer_domain is ScaleDomain.TENSOR:
        return f"outer_domain={spec.outer_domain}: a row's bytes depend on the other rows"
    if spec.block is Block.TILE_16:
        return f"block={spec.block}: 16 rows share block scales"
    return ""

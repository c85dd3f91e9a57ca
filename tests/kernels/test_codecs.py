"""E2M1 and E4M3, exhaustively, against tables built from their definitions and against other libraries."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import nvfp4_oracle as oracle
import torch
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, f32_to_f4_unpacked

from kernels import codec_e2m1, codec_e4m3

EVERY_POSITIVE_BF16 = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()


def neighbours(points: np.ndarray) -> torch.Tensor:
    """Every point with the float32 numbers on both sides of it."""
    points = points.astype(np.float32)
    below, above = np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))
    return torch.from_numpy(np.concatenate([below, points, above]))


def midpoints(values: np.ndarray) -> np.ndarray:
    return (values[1:] + values[:-1]) / 2


def test_e2m1_decodes_all_codes() -> None:
    decoded = codec_e2m1.decode(torch.arange(16, dtype=torch.uint8))
    assert decoded.tolist() == [*oracle.E2M1, *(-oracle.E2M1)]
    assert torch.signbit(decoded).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(decoded, f4_unpacked_to_f32(torch.arange(16, dtype=torch.uint8)))


def test_e2m1_decoding_is_exact_in_bf16() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(codec_e2m1.decode(codes, torch.bfloat16).double(), codec_e2m1.decode(codes).double())


def test_e2m1_encoding_inverts_decoding() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(codec_e2m1.encode(codec_e2m1.decode(codes)), codes)


def test_e2m1_encodes_every_bf16_and_every_tie_to_nearest_even() -> None:
    x = torch.cat([EVERY_POSITIVE_BF16, neighbours(oracle.E2M1[1:]), neighbours(midpoints(oracle.E2M1))])
    expected = torch.from_numpy(oracle.nearest_even(x.double().numpy(), oracle.E2M1))
    assert torch.equal(codec_e2m1.encode(x), expected)
    assert torch.equal(codec_e2m1.encode(-x), expected + 8)


def test_e2m1_rounding_agrees_with_exact_fractions() -> None:
    grid = torch.arange(0, 4096) / 512  # 0 to 8 in steps finer than any tie
    table = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    for value, code in zip(grid.tolist(), codec_e2m1.encode(grid).tolist(), strict=True):
        distances = [abs(Fraction(value) - entry) for entry in table]
        nearest = [index for index, distance in enumerate(distances) if distance == min(distances)]
        assert code == (nearest[0] if len(nearest) == 1 else next(n for n in nearest if n % 2 == 0))


def test_e2m1_encoding_agrees_with_torchao_and_compressed_tensors() -> None:
    x = torch.cat([EVERY_POSITIVE_BF16.clamp(max=6), neighbours(midpoints(oracle.E2M1))])
    x = torch.cat([x, -x])
    codes = codec_e2m1.encode(x)
    assert torch.equal(codes, f32_to_f4_unpacked(x))
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(codec_e2m1.decode(codes), FP4_E2M1_DATA.cast_to_fp4(x.clone()))


def test_all_products_of_two_e2m1_values_are_exact() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        values = codec_e2m1.decode(torch.arange(16, dtype=torch.uint8), dtype)
        products = values[:, None] * values
        assert torch.equal(products.double(), values.double()[:, None] * values.double())


def test_e4m3_decodes_all_bytes() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    decoded = codec_e4m3.decode(every)
    signed = np.concatenate([oracle.E4M3, [np.nan], -oracle.E4M3, [np.nan]])
    np.testing.assert_array_equal(decoded.numpy(), signed)
    np.testing.assert_array_equal(decoded.numpy(), every.view(torch.float8_e4m3fn).float().numpy())
    np.testing.assert_array_equal(codec_e4m3.decode(every, torch.bfloat16).float().numpy(), signed)


def test_e4m3_encoding_inverts_decoding() -> None:
    finite = torch.arange(127, dtype=torch.uint8)
    assert torch.equal(codec_e4m3.encode(codec_e4m3.decode(finite)), finite)


def test_e4m3_encodes_every_bf16_and_every_tie_to_nearest_even() -> None:
    x = torch.cat([EVERY_POSITIVE_BF16, neighbours(oracle.E4M3[1:]), neighbours(midpoints(oracle.E4M3))])
    expected = torch.from_numpy(oracle.nearest_even(x.double().numpy(), oracle.E4M3))
    assert torch.equal(codec_e4m3.encode(x), expected)


def test_code_times_block_scale_is_exact_in_bf16() -> None:
    values = codec_e2m1.decode(torch.arange(16, dtype=torch.uint8), torch.bfloat16)
    scales = codec_e4m3.decode(torch.arange(127, dtype=torch.uint8), torch.bfloat16)
    products = values[:, None] * scales
    assert torch.equal(products.double(), values.double()[:, None] * scales.double())

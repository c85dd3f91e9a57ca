"""Two codes to a byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torchao.prototype.mx_formats.kernels import pack_uint4, unpack_uint4

from kernels import codec_e2m1
from kernels.packing import decode_packed, pack, unpack

PACKED = arrays(np.uint8, array_shapes(min_dims=1, max_dims=4, max_side=9))
SHAPES = array_shapes(min_dims=1, max_dims=4, max_side=9).map(lambda shape: (*shape[:-1], 2 * shape[-1]))
CODES = SHAPES.flatmap(lambda shape: arrays(np.uint8, shape, elements=st.integers(0, 15)))


@settings(deadline=None)
@given(CODES)
def test_unpacking_inverts_packing(codes: np.ndarray) -> None:
    packed = pack(torch.from_numpy(codes))
    assert packed.shape == (*codes.shape[:-1], codes.shape[-1] // 2)
    np.testing.assert_array_equal(unpack(packed).numpy(), codes)


@settings(deadline=None)
@given(CODES)
def test_even_element_is_the_low_nibble(codes: np.ndarray) -> None:
    np.testing.assert_array_equal(
        pack(torch.from_numpy(codes)).numpy(), codes[..., ::2] + 16 * codes[..., 1::2]
    )


@settings(deadline=None)
@given(PACKED)
def test_packing_inverts_unpacking(packed: np.ndarray) -> None:
    np.testing.assert_array_equal(pack(unpack(torch.from_numpy(packed))).numpy(), packed)


@settings(deadline=None)
@given(PACKED)
def test_decoding_bytes_is_decoding_codes(array: np.ndarray) -> None:
    packed = torch.from_numpy(array)
    expected = codec_e2m1.decode(unpack(packed), torch.bfloat16)
    assert torch.equal(decode_packed(packed).view(torch.int16), expected.view(torch.int16))  # -0 told apart


def test_packing_agrees_with_torchao_and_compressed_tensors() -> None:
    codes = torch.cartesian_prod(*[torch.arange(16, dtype=torch.uint8)] * 2)  # every pair
    assert torch.equal(pack(codes), pack_uint4(codes))
    assert torch.equal(unpack(pack(codes)), unpack_uint4(pack(codes)))
    assert torch.equal(pack(codes), pack_fp4_to_uint8(codec_e2m1.decode(codes)))


def test_packing_takes_slices_that_are_not_contiguous() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(6, 2)
    assert torch.equal(pack(codes[::2, 4:20]), pack(codes[::2, 4:20].clone()))


def test_an_odd_row_is_refused() -> None:
    with pytest.raises(ValueError, match="even number of codes in a row, got 3"):
        pack(torch.zeros(2, 3, dtype=torch.uint8))

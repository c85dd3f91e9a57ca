"""Digests of tensors."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.digest import byte_view, fast_digest, fast_digests, tensor_digest


def test_digest_of_a_known_tensor() -> None:
    expected = hashlib.sha256(b"torch.uint8(2, 2)" + bytes([1, 2, 3, 4])).hexdigest()
    assert tensor_digest(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_digest_sees_one_element_shape_and_dtype_but_not_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    digest = tensor_digest(tensor)
    assert digest == tensor_digest(tensor.clone()) == tensor_digest(tensor.T.contiguous().T)
    changed = tensor.clone().view(torch.uint8)
    changed[3, -1] ^= 1
    others = [changed.view(dtype), tensor.reshape(6, 4), tensor.view(torch.uint8).view(torch.int8)]
    assert digest not in [tensor_digest(other) for other in others]


def test_digest_tells_zeros_apart_and_takes_scalars_and_parameters() -> None:
    assert tensor_digest(torch.tensor(0.0)) != tensor_digest(torch.tensor(-0.0))
    assert tensor_digest(torch.nn.Parameter(torch.ones(2))) == tensor_digest(torch.ones(2))
    assert tensor_digest(torch.zeros(0, 3)) != tensor_digest(torch.zeros(0, 4))


def by_definition(content: bytes) -> int:
    """The fast digest as the module's text has it, word by word."""
    mask = 2**64 - 1

    def mix(state: int) -> int:
        x = (state + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    padded = content + bytes(-len(content) % 4)
    total = 0
    for index in range(len(padded) // 4):
        word = int.from_bytes(padded[4 * index : 4 * index + 4], "little", signed=True)
        row, column = divmod(index, 2**14)
        total += word * (mix(column) | 1) * (mix(2**32 + row) | 1)
    return total & mask


@pytest.mark.parametrize(
    "size", [0, 1, 3, 4, 7, 64, 4 * 2**14, 4 * 2**14 + 2, 3 * 4 * 2**14 + 5, 11 * 4 * 2**14]
)
def test_fast_digest_agrees_with_its_definition(size: int) -> None:
    content = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert int(fast_digest(content)) % 2**64 == by_definition(content.numpy().tobytes())


def test_fast_digest_is_of_the_bytes_in_row_major_order_wherever_they_start() -> None:
    tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    digest = int(fast_digest(tensor))
    assert digest == int(fast_digest(tensor.T.contiguous().T)) == int(fast_digest(tensor.flatten()))
    shifted = torch.cat((torch.zeros(3, dtype=torch.uint8), byte_view(tensor)))[3:]
    assert int(fast_digest(shifted)) == digest
    assert fast_digests({"a": tensor, "b": tensor.bfloat16()})["a"] == digest % 2**64
    assert fast_digests({}) == {}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.data())
def test_fast_digest_sees_changed_words_swaps_and_shifts(seed: int, data: st.DataObject) -> None:
    words = torch.randint(
        -(2**31), 2**31, (40_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
    )
    digest = int(fast_digest(words))
    one, other = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    changed = words.clone()
    changed[one] ^= 1 << data.draw(st.integers(0, 30))
    assert int(fast_digest(changed)) != digest
    if words[one] != words[other]:
        swapped = words.clone()
        swapped[[one, other]] = words[[other, one]]
        assert int(fast_digest(swapped)) != digest
    assert int(fast_digest(words.roll(2**14))) != digest  # a whole row of the table


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_fast_digest_is_the_same_on_a_gpu() -> None:
    content = torch.randint(256, (5 * 4 * 2**14 + 3,), dtype=torch.uint8)
    assert int(fast_digest(content.cuda())) == int(fast_digest(content))

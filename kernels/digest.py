"""Digests that identify a tensor's content: SHA-256 for records, and a fast one for every weight sync.

The fast digest of N bytes: pad with zeros to whole 32-bit words (little endian, signed), w[0], w[1], ..., and sum

    w[i] * a(i % C) * b(i // C)  mod 2^64,  C = 2^14,

where a(c) = mix(c) | 1, b(r) = mix(2^32 + r) | 1 and mix(x) is splitmix64's output for the state x. Integer arithmetic
wraps in the same way everywhere, so that a CPU and a GPU agree whatever the order of the sum.

- Every change within one word is seen: the multipliers are odd, and a product with an odd number is zero only for zero.
- Any other change that does not aim at the digest (words swapped, rows shifted, a part left stale) goes unseen with a
  probability of about 2^-63, and of 2^-32 at the very worst, when all words that differ do so in their top bit alone.
- It does not see type, shape or trailing zeros: those are compared apart. It is no protection against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch

_COLUMNS = 1 << 14  # a table of 128 KiB, which stays in a cache
_ROWS_AT_A_TIME = {"cpu": 8, "cuda": 1 << 12}  # temporaries of 1 MiB, or of 512 MiB


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hexadecimal) over dtype, shape and the bytes of `tensor` in row-major order.

    The bytes are those of the value as stored, so +0 and -0, and two NaN patterns, are told apart.
    """
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(content.numpy().data)
    return digest.hexdigest()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes], the content of `tensor` in row-major order: its own memory where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def fast_digest(tensor: torch.Tensor) -> torch.Tensor:
    """int64 scalar on the tensor's device: the digest of its bytes in row-major order (see above)."""
    content = byte_view(tensor)
    words, rest = divmod(content.numel(), 4)
    total = content.new_zeros((), dtype=torch.int64)
    if words:
        aligned = content[: 4 * words]
        if aligned.storage_offset() % 4:
            aligned = aligned.clone()
        total = total + _sum_of_words(aligned.view(torch.int32))
    if rest:
        last = torch.zeros(4, dtype=torch.uint8, device=content.device)
        last[:rest] = content[4 * words :]
        row, column = divmod(words, _COLUMNS)
        weight = (
            _multipliers(0, _COLUMNS, content.device)[column] * _row_multipliers(row, 1, content.device)[0]
        )
        total = total + last.view(torch.int32)[0] * weight
    return total


def fast_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """`fast_digest` of each, as a number in [0, 2^64); one wait for the device for all of them."""
    if not tensors:
        return {}
    device = next(iter(tensors.values())).device
    found = torch.stack([fast_digest(tensor).to(device) for tensor in tensors.values()]).tolist()
    return dict(zip(tensors, (number % 2**64 for number in found), strict=True))


def _sum_of_words(words: torch.Tensor) -> torch.Tensor:
    """int32 [W], W >= 1 -> int64 scalar."""
    columns = _multipliers(0, _COLUMNS, words.device)
    whole, rest = divmod(words.numel(), _COLUMNS)
    at_a_time = _ROWS_AT_A_TIME["cpu" if words.device.type == "cpu" else "cuda"]
    sums = []
    table = words[: whole * _COLUMNS].view(whole, _COLUMNS)
    for start in range(0, whole, at_a_time):
        sums.append((table[start : start + at_a_time] * columns).sum(1))
    if rest:
        sums.append((words[whole * _COLUMNS :] * columns[:rest]).sum(0, keepdim=True))
    rows = torch.cat(sums)
    return (rows * _row_multipliers(0, len(rows), words.device)).sum()


def _row_multipliers(first: int, count: int, device: torch.device) -> torch.Tensor:
    """b(first), b(first + 1), ...: from a table whose length is a power of two, which is made once."""
    size = 1 << max(8, (first + count - 1).bit_length())
    return _multipliers(1 << 32, size, device)[first : first + count]


@lru_cache(maxsize=64)
def _multipliers(start: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 [count]: mix(start), mix(start + 1), ..., made odd."""
    return (
        torch.tensor([_mix(start + i) | 1 for i in range(count)], dtype=torch.uint64)
        .view(torch.int64)
        .to(device)
    )


def _mix(state: int) -> int:
    """splitmix64: the output for one state."""
    mask = 2**64 - 1
    x = (state + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)

"""The bytes in which two arrays differ, as gaps and values: the arithmetic of the delta codec. Pure torch, exact.

With positions p[0] < p[1] < ... of the bytes that differ, gap g[i] = p[i] - p[i-1] - 1 (p[-1] = -1) is written in units
of W bits: as many units of value E = 2^W - 1 ("skip E bytes, write none") as E fits into g[i], then the remainder. The
new bytes follow:

    units [U] of W bits (little endian), padded to a multiple of 4 bytes | values, uint8 [P]

The number P of changes travels beside the stream. `smallest_width` says which W, 8 or 16, gives fewer bytes.
"""

from __future__ import annotations

import torch

WIDTHS = (8, 16)
_WORD = 8  # bytes


def changed_positions(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """uint8 [N], uint8 [N] -> int64 [P], ascending.

    Words of eight bytes are compared first: few of them differ, and only those are looked at byte by byte.
    """
    whole = old.numel() // _WORD * _WORD
    words = torch.nonzero(_words(old[:whole]) != _words(new[:whole])).flatten()
    bytes_of = old[:whole].view(-1, _WORD)[words] != new[:whole].view(-1, _WORD)[words]
    word, byte = torch.nonzero(bytes_of).unbind(1)
    rest = torch.nonzero(old[whole:] != new[whole:]).flatten() + whole
    return torch.cat((words[word] * _WORD + byte, rest))


def encoded_size(positions: torch.Tensor, width: int) -> int:
    """Bytes of `encode(positions, ..., width)`."""
    units = len(positions) + int((_gaps(positions) // (2**width - 1)).sum())
    return _unit_bytes(units, width) + len(positions)


def smallest_width(positions: torch.Tensor) -> tuple[int, int]:
    """The better W for these positions, and the bytes of the stream."""
    sizes = {width: encoded_size(positions, width) for width in WIDTHS}
    width = min(WIDTHS, key=sizes.__getitem__)
    return width, sizes[width]


def encode(positions: torch.Tensor, values: torch.Tensor, width: int) -> torch.Tensor:
    """positions: int64 [P], ascending, P >= 1; values: uint8 [P] -> uint8, the stream in units of `width` bits."""
    escape = 2**width - 1
    gaps = _gaps(positions)
    last = (gaps // escape + 1).cumsum(0) - 1  # index of the unit with the remainder
    count = int(last[-1]) + 1
    units = torch.full((count,), escape, dtype=torch.int32, device=positions.device)
    units[last] = (gaps % escape).int()
    stream = torch.zeros(
        _unit_bytes(count, width) + len(positions), dtype=torch.uint8, device=positions.device
    )
    head = stream[: count * width // 8]
    if width == 8:
        head.copy_(units)
    else:  # the low byte first, whatever the machine's order
        head.view(-1, 2).copy_(torch.stack((units & 255, units >> 8), dim=1))
    stream[_unit_bytes(count, width) :] = values
    return stream


def decode(stream: torch.Tensor, width: int, count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: positions int64 [count] in [0, size) and values uint8 [count].

    count: of the bytes that differ. Raises ValueError for a stream that `encode` cannot have made.
    """
    escape = 2**width - 1
    head = stream[: len(stream) - count]
    if count < 1 or len(stream) < count or len(head) % 4:
        raise ValueError(f"{len(stream)} bytes cannot hold {count} changes")
    if width == 8:
        units = head.int()
    else:
        pairs = head.view(-1, 2).int()
        units = pairs[:, 0] | pairs[:, 1] << 8
    remainders = torch.nonzero(units != escape).flatten()
    # Padding units are zero, and come behind the last remainder that counts.
    if len(remainders) < count or _unit_bytes(int(remainders[count - 1]) + 1, width) != len(head):
        raise ValueError(f"{len(stream)} bytes cannot hold {count} changes")
    used = units[: int(remainders[count - 1]) + 1].long()
    remainders = remainders[:count]
    positions = used.cumsum(0)[remainders] + torch.arange(count, device=stream.device)
    if int(positions[-1]) >= size:
        raise ValueError(f"a change at byte {int(positions[-1])} of {size}")
    return positions, stream[len(stream) - count :]


def _words(content: torch.Tensor) -> torch.Tensor:
    """uint8 [8 * W] -> int64 [W]."""
    return (content if content.storage_offset() % _WORD == 0 else content.clone()).view(torch.int64)


def _gaps(positions: torch.Tensor) -> torch.Tensor:
    return torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1


def _unit_bytes(units: int, width: int) -> int:
    return -(-units * width // 8 // 4) * 4

"""Two E2M1 codes to a byte: the element with the even index in the low nibble."""

from __future__ import annotations

import torch

from kernels import codec_e2m1


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes (0 to 15) [..., K] -> uint8 [..., K/2]. Raises ValueError when K is odd."""
    if codes.shape[-1] % 2:
        raise ValueError(f"packing needs an even number of codes in a row, got {codes.shape[-1]}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] -> uint8 codes [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_packed(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] -> bfloat16 element values [..., K], equal to decoding the unpacked codes."""
    # One table entry holds the two values of a byte, so that a look-up moves four bytes at once.
    every_byte = torch.arange(256, dtype=torch.uint8, device=packed.device)
    pairs = codec_e2m1.decode(unpack(every_byte[:, None]), torch.bfloat16).view(torch.int32).flatten()
    found = pairs.index_select(0, packed.flatten().int())
    return found.view(torch.bfloat16).view(*packed.shape[:-1], 2 * packed.shape[-1])

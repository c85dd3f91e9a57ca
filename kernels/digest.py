"""Digests that identify a tensor's content."""

from __future__ import annotations

import hashlib

import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hexadecimal) over dtype, shape and the bytes of `tensor` in row-major order.

    The bytes are those of the value as stored, so +0 and -0, and two NaN patterns, are told apart.
    """
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(content.numpy().data)
    return digest.hexdigest()

"""Log-probability and entropy of given tokens, and their gradient, each in one pass over FP32 logits.

With x = logits / temperature and z = log sum exp x: log p_j = x_j - z, H = -sum p_j log p_j, and for the token i
d log p_i / dx_j = [i = j] - p_j, dH / dx_j = -p_j (log p_j + H).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.codec import as_stored, bf16_low, round_bf16, to_bf16

_FORWARD, _GRADIENT = 4096, 2048  # logits at a time


class TokenStatistics(NamedTuple):
    """float32 [N] each: log-probability, entropy in nats, log-normaliser z."""

    logp: torch.Tensor
    entropy: torch.Tensor
    normalizer: torch.Tensor


def token_statistics(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> TokenStatistics:
    """logits: float32 [N, V]; ids: int64 [N], in [0, V), which is not checked. Raises ValueError for other types or
    shapes.
    """
    rows, vocab = _checked(logits, ids)
    found = TokenStatistics(*(torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3)))
    if rows:
        _statistics[(rows,)](
            logits, ids, *found, temperature, VOCAB=vocab, UNIT=temperature == 1, BLOCK=_FORWARD, num_warps=8
        )
    return found


def logits_gradient(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    found: TokenStatistics,
    d_logp: torch.Tensor,
    d_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """bfloat16 [2, N, V]: the gradient of the logits, rounded, and what rounding left out, rounded; together they lack
    at most 2^-16 of each element. d_logp, d_entropy: float32 [N]; None: of no entropy. Raises as `token_statistics`.
    """
    rows, vocab = _checked(logits, ids)
    terms = torch.empty(2, rows, vocab, dtype=torch.bfloat16, device=logits.device)
    if terms.numel():
        _gradient[(rows, triton.cdiv(vocab, _GRADIENT))](
            logits,
            ids,
            found.normalizer,
            found.entropy,
            d_logp.contiguous(),
            found.entropy if d_entropy is None else d_entropy.contiguous(),
            as_stored(terms),
            temperature,
            rows,
            VOCAB=vocab,
            UNIT=temperature == 1,
            ENTROPY=d_entropy is not None,
            BLOCK=_GRADIENT,
        )
    return terms


def _checked(logits: torch.Tensor, ids: torch.Tensor) -> tuple[int, int]:
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError(f"logits must be float32 [N, V] in rows, got {logits.dtype} {tuple(logits.shape)}")
    if ids.dtype != torch.int64 or ids.shape != logits.shape[:1]:
        raise ValueError(f"ids must be int64 [{len(logits)}], got {ids.dtype} {tuple(ids.shape)}")
    return logits.shape[0], logits.shape[1]


@triton.jit
def _scaled(x, temperature, UNIT: tl.constexpr):
    return x if UNIT else tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * temperature)


@triton.jit
def _statistics(
    logits,
    ids,
    logp,
    entropy,
    normalizer,
    temperature,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row a program. Sums are kept relative to the largest logit so far: of e^(x - top), and of that times
    (x - top).
    """
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * VOCAB
    top, total, weighted = -3.0e38, 0.0, 0.0
    for start in range(0, VOCAB, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < VOCAB
        x = _scaled(tl.load(at + column, mask=inside, other=0.0), temperature, UNIT)
        higher = tl.maximum(top, tl.max(tl.where(inside, x, -3.0e38), axis=0))
        shifted = tl.where(inside, x - higher, 0.0)
        power = tl.where(inside, tl.exp(shifted), 0.0)
        kept = tl.exp(top - higher)
        weighted = kept * (weighted + total * (top - higher)) + tl.sum(power * shifted, axis=0)
        total = kept * total + tl.sum(power, axis=0)
        top = higher
    log_total = tl.log(total)
    chosen = _scaled(tl.load(at + tl.load(ids + row) + tl.arange(0, 1)), temperature, UNIT)
    tl.store(logp + row + tl.arange(0, 1), chosen - top - log_total)
    tl.store(entropy + row, log_total - weighted / total)
    tl.store(normalizer + row, top + log_total)


@triton.jit
def _gradient(
    logits,
    ids,
    normalizer,
    entropy,
    d_logp,
    d_entropy,
    terms,
    temperature,
    rows,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < VOCAB
    x = _scaled(tl.load(logits + row * VOCAB + column, mask=inside, other=0.0), temperature, UNIT)
    log_p = x - tl.load(normalizer + row)
    p = tl.exp(log_p)
    gradient = tl.load(d_logp + row) * (tl.where(column == tl.load(ids + row), 1.0, 0.0) - p)
    if ENTROPY:
        gradient -= tl.load(d_entropy + row) * p * (log_p + tl.load(entropy + row))
    gradient = _scaled(gradient, temperature, UNIT)
    high = bf16_low(round_bf16(gradient))
    tl.store(terms + row * VOCAB + column, to_bf16(gradient), mask=inside)
    low = terms + (tl.cast(rows, tl.int64) + row) * VOCAB + column  # a single row is a constant
    tl.store(low, to_bf16(gradient - high), mask=inside)

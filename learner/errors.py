"""Errors that a caller tells apart. Whoever drives learners in other processes imports this, and not Megatron-core."""

from __future__ import annotations


class OtherRankFailed(RuntimeError):
    """An error on another of the processes that share a model; what it was, that one says."""

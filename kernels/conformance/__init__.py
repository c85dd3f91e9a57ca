"""Conformance of back ends and quantisers to an execution spec: `python -m kernels.conformance`."""

from __future__ import annotations

from kernels.conformance.backend import Adapter, Backend, PermutingBackend, Subject
from kernels.conformance.check import Kind, Outcome, Status
from kernels.conformance.suite import conformance, format_table

__all__ = [
    "Adapter",
    "Backend",
    "Kind",
    "Outcome",
    "PermutingBackend",
    "Status",
    "Subject",
    "conformance",
    "format_table",
]

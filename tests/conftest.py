"""Triton kernels run in Triton's interpreter where there is no GPU. Triton reads the variable when it is imported,
which some test modules do through other libraries: it is set ahead of all of them.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

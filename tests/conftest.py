"""Settings of the whole suite.

Triton kernels run in Triton's interpreter where there is no GPU. Triton reads the variable when it is imported, which
some test modules do through other libraries: it is set ahead of all of them.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes that share the suite should end together: files with slow tests come first, of those the ones of `rl`,
    which start whole runs, and after them the files of the sampler, which start engines. What is left is many small
    files.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    runs = {path for path in slow if path.parent.name == "rl"}
    items.sort(
        key=lambda item: (item.path not in runs, item.path not in slow, item.path.parent.name != "sampler")
    )

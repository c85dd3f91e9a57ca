from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels import interpreter
from tests.kernels.triton_env import DEVICE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products lose time to threads, much of it on a busy machine. A test may set another number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if DEVICE.type == "cuda":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        interpreter.quicken(patch)
        yield

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.triton_env import DEVICE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products lose time to threads, much of it on a busy machine. A test may set another number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def language_replaced_once_a_launch() -> Iterator[None]:
    """At a launch, and again at every call of a device function, Triton's interpreter replaces the functions of
    `triton.language` by its own. The calls take a third of its time, and change what the launch has left to change.
    """
    if DEVICE.type == "cuda":
        yield
        return
    from triton.runtime import interpreter

    replace, language = interpreter._patch_lang, {id(interpreter.tl), id(interpreter.tl.core)}
    replaced: set[frozenset[int]] = set()

    def replace_once(function: Any) -> Any:
        seen = frozenset(language.intersection(map(id, function.__globals__.values())))
        if seen in replaced:
            return interpreter._LangPatchScope()  # with nothing to restore
        scope = replace(function)
        replaced.add(seen)
        restore = scope.restore

        def restore_all() -> None:
            restore()
            replaced.clear()

        scope.restore = restore_all
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield

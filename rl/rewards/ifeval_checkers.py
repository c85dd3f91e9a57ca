"""lm-eval's checkers of IFEval instructions, without the rest of lm-eval, and such that they always say the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from rl.errors import ConfigError

_PACKAGES = (
    "lm_eval",
    "lm_eval.tasks",
)  # importing these loads pandas, PyArrow and every other metric's needs


@cache
def checkers() -> Any:
    """The module ``lm_eval.tasks.ifeval.utils``.

    Raises ConfigError when lm-eval, a package that its checkers need, or NLTK's table of sentences is missing; nothing
    is downloaded.
    """
    try:
        import langdetect
        import nltk
    except ImportError as error:
        raise ConfigError(
            f"IFEval's checkers need the package {error.name} (pip install minite[ifeval])"
        ) from error
    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError as error:
        raise ConfigError(
            "IFEval's checkers need NLTK's punkt_tab, found in none of"
            f" {', '.join(nltk.data.path)}: set NLTK_DATA to a folder with tokenizers/punkt_tab, or run"
            " python -m nltk.downloader punkt_tab"
        ) from error
    langdetect.DetectorFactory.seed = 0  # else the language of a short text is drawn anew at each call
    found = find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("IFEval's checkers need the package lm_eval (pip install minite[ifeval])")
    with _bare_packages(Path(found.submodule_search_locations[0])):
        return import_module("lm_eval.tasks.ifeval.utils")


@contextmanager
def fixed_draws() -> Iterator[None]:
    """The checkers draw a letter where IFEval's prompt asks for a sign (keys 1122 and 1129): always the same one."""
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def _bare_packages(root: Path) -> Iterator[None]:
    """Stand-ins for lm-eval's packages, whose own code is not run, unless somebody has imported the real ones."""
    if _PACKAGES[-1] in sys.modules:
        yield
        return
    before = {name for name in sys.modules if name.startswith("lm_eval")}
    for name, folder in zip(_PACKAGES, (root, root / "tasks"), strict=True):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules.setdefault(name, package)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith("lm_eval") and name not in before]:
            del sys.modules[name]

"""Code of libraries that are not installed, loaded from their wheels or by the names of its functions.

The wheels lie in `.oracles` below the repository's root, or in the directory that MINITE_ORACLES names:

    SKIP_CUDA_BUILD=1 pip wheel --no-deps --no-build-isolation -w .oracles -r requirements-oracles.lock

Nothing is installed: Python imports from the zip archives, and packages' `__init__`, which want a GPU or further
packages, do not run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import types
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def wheel(distribution: str) -> Path:
    """The wheel of `distribution`. Skips the test when there is none, unless MINITE_ORACLES asks for it."""
    asked = os.environ.get("MINITE_ORACLES")
    directory = Path(asked) if asked else ROOT / ".oracles"
    found = sorted(directory.glob(f"{distribution}-*.whl"))
    if not found and asked:
        pytest.fail(f"MINITE_ORACLES={asked} has no wheel of {distribution}")
    if not found:
        pytest.skip(f"no wheel of {distribution} in {directory}; see tests/kernels/oracles/loading.py")
    return found[-1]


@contextmanager
def bare_packages(archive: Path, *names: str, **stubs: Any) -> Iterator[None]:
    """Within: the packages `names` are importable from `archive` without their `__init__`.

    stubs: attributes of the last of `names`. Everything that is imported within is forgotten again by
    `sys.modules`, so that no other test meets a half-loaded package.
    """
    top = names[0].partition(".")[0]
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == top}
    for name in before:
        del sys.modules[name]
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [f"{archive}/{name.replace('.', '/')}"]
        sys.modules[name] = package
    vars(sys.modules[names[-1]]).update(stubs)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == top]:
            del sys.modules[name]
        sys.modules.update(before)


def load(archive: Path, module: str, *packages: str, **stubs: Any) -> types.ModuleType:
    """`module` from the wheel `archive`, below `packages` without their `__init__`."""
    with bare_packages(archive, *packages, **stubs):
        return importlib.import_module(module)


def archived_source(archive: Path, member: str) -> str:
    return zipfile.ZipFile(archive).read(member).decode()


def installed_source(module: str) -> str:
    """The text of an installed module, which is not imported."""
    package, _, rest = module.partition(".")
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations, f"{package} is not installed"
    return Path(found.submodule_search_locations[0], rest.replace(".", "/") + ".py").read_text()


def functions(source: str, names: Collection[str], **namespace: Any) -> dict[str, Any]:
    """The functions `names` of a module's text, without decorators and annotations, in `namespace`."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    missing = set(names) - {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not missing, f"no functions {sorted(missing)}"
    for node in tree.body:
        assert isinstance(node, ast.FunctionDef)
        node.decorator_list, node.returns = [], None
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            argument.annotation = None
    exec(compile(tree, "<functions>", "exec"), namespace)
    return namespace

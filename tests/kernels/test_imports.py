"""The package imports alone."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import kernels

FORBIDDEN = ["ray", "vllm", "megatron", "transformers", "learner", "sampler", "rl"]


def test_importing_every_module_imports_no_engine() -> None:
    modules = [module.name for module in pkgutil.iter_modules(kernels.__path__, "kernels.")]
    assert len(modules) > 10
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}];"
        f"print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

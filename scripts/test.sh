#!/usr/bin/env bash
# Sets everything up and runs the checks and the test suite. Extra arguments go to pytest: scripts/test.sh tests/kernels
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
./scripts/oracles.sh
export MINITE_ORACLES="$PWD/.oracles"  # a wheel that is missing fails its tests
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
lint-imports
mypy
exec python -m pytest "$@"

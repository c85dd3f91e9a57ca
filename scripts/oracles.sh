#!/usr/bin/env bash
# Fetches the wheels that tests/kernels compares quantisers with into .oracles (104 MB). They are never installed. Does
# nothing when that was done for this lock file. Needs the environment of scripts/setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly LOCK=requirements-oracles.lock
readonly STAMP=.oracles/complete

if cmp --silent "$LOCK" "$STAMP"; then exit 0; fi
echo "oracles: fetching $(grep -c == "$LOCK") wheels to compare with"
rm -rf .oracles
# fouroversix comes as source, and builds a CUDA extension unless told not to.
SKIP_CUDA_BUILD=1 .venv/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir .oracles --requirement "$LOCK"
cp "$LOCK" "$STAMP"

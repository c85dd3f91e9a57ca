#!/usr/bin/env bash
# Creates .venv and installs the pinned CPU environment. Does nothing when that was done for this lock file.
# Usage: scripts/setup.sh            PYTHON=/path/to/python3.11 scripts/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly LOCK=requirements-cpu.lock
readonly NEEDED_GIB=8
readonly STAMP=.venv/minite-installed

fail() { echo "setup: $*" >&2; exit 2; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        if [[ -n "$candidate" ]] \
            && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"; return
        fi
    done
    fail "Python 3.11 was not found. Install it (Debian/Ubuntu: apt-get install python3.11 python3.11-venv)" \
         "or name it: PYTHON=/path/to/python3.11 $0"
}

fingerprint() { cat "$LOCK" pyproject.toml | sha256sum | cut -d' ' -f1; }

[[ "$(uname -sm)" == "Linux x86_64" ]] || fail "this lock file is for x86-64 Linux, found $(uname -sm)"
if [[ -f "$STAMP" && "$(cat "$STAMP")" == "$(fingerprint)" ]]; then exit 0; fi

python=$(find_python)
free_gib=$(df -Pk . | awk 'NR==2 {print int($4 / 1048576)}')
(( free_gib >= NEEDED_GIB )) || fail "$NEEDED_GIB GiB of free disk are needed in $PWD, found $free_gib GiB"
"$python" -c 'import venv, ensurepip' 2>/dev/null \
    || fail "this Python has no venv module (Debian/Ubuntu: apt-get install python3.11-venv)"

echo "setup: creating .venv with $("$python" --version) and installing $(grep -c == "$LOCK") pinned packages"
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile "$@"; }
torch=$(grep '^torch==' "$LOCK")
# The CPU build of torch is found where pip looks anyway (a mirror, local wheels) or on PyTorch's own index.
pip "$torch" 2>/dev/null || pip --index-url https://download.pytorch.org/whl/cpu "$torch" \
    || fail "could not install $torch"
echo "setup: torch is installed, the other packages follow (some minutes)"
pip "$(grep '^setuptools==' "$LOCK")"
# Two at a time: unpacking keeps a core busy.
pip --requirement <(awk '/==/ && NR % 2' "$LOCK") &
half=$!
pip --requirement <(awk '/==/ && NR % 2 == 0' "$LOCK") || fail "could not install $LOCK"
wait "$half" || fail "could not install $LOCK"
pip --no-build-isolation --editable . || fail "could not install minite itself"
# On all cores; pip compiles on one. Some packages hold files that are no Python of this version.
.venv/bin/python -m compileall -qq -j 0 .venv/lib > /dev/null || true
fingerprint > "$STAMP"

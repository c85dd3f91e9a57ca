#!/usr/bin/env bash
# One command, on one node or on the first of several (scripts/cluster): plans the run, then starts it, or goes on with
# its newest run when that was stopped.
# Usage: scripts/launch_minite.sh +recipe=NAME [group.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (( $# == 0 )); then
    echo "usage: $0 +recipe=NAME [group.key=value ...]" >&2
    exit 2
fi
[[ -x .venv/bin/python ]] && PATH="$PWD/.venv/bin:$PATH"
command -v python >/dev/null || { echo "launch: no Python here: run scripts/setup.sh, or use the image" >&2; exit 2; }

python -m rl.train "$@" plan=true
exec python -m rl.train "$@" run.resume=latest

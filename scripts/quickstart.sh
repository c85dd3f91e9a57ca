#!/usr/bin/env bash
# Sets everything up and runs the main job on this machine's CPU: reinforcement learning of a small MoE model with
# NVFP4 experts in vLLM (sampler) and Megatron-core (learner), rl.train +recipe=tiny run.name=quickstart. Extra arguments
# are overrides. Says so on stderr when the run, as it stands, has learned less than the README says.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec .venv/bin/python -m rl.quickstart "$@"

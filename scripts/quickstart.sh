#!/usr/bin/env bash
# Sets everything up and runs the main job on this machine's CPU: reinforcement learning of a small MoE model with
# NVFP4 experts in vLLM (sampler) and Megatron-core (learner). Extra arguments go to rl.train as overrides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh
exec .venv/bin/python -m rl.train +recipe=tiny run.name=quickstart "$@"

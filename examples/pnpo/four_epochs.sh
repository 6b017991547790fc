#!/usr/bin/env bash
# The tiny task with four epochs of reuse and no other lag: what the other regimes are compared with. Further arguments override the config.
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
"${MEGATRON_RL_VENV:-.venv}/bin/python" -m megatron_rl.apps.tasks.tiny_task --output .cache/tiny_task
train four_epochs.yaml "$@"

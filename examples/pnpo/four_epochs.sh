#!/usr/bin/env bash
# The tiny task with four epochs of reuse and no other lag: what the other regimes are compared with. Further arguments override the config.
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
"${MEGATRON_RL_VENV:-.venv}/bin/python" tools/make_tiny_task.py --output .cache/tiny_task
train four_epochs.yaml "$@"

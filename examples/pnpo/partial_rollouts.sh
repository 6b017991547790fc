#!/usr/bin/env bash
# The tiny task with weights that change every 16 tokens of a running generation. Further arguments override the config.
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
"${MEGATRON_RL_VENV:-.venv}/bin/python" tools/make_tiny_task.py --output .cache/tiny_task
train partial_rollouts.yaml "$@"

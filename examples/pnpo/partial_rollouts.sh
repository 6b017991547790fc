#!/usr/bin/env bash
# The tiny task with weights that change every 16 tokens of a running generation. Further arguments override the config.
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
"${MEGATRON_RL_VENV:-.venv}/bin/python" -m megatron_rl.apps.tasks.tiny_task --output .cache/tiny_task
train partial_rollouts.yaml "$@"

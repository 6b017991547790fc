#!/usr/bin/env bash
# The tiny task with one process that trains and one that generates, at the same time. Further arguments override the config.
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
"${MEGATRON_RL_VENV:-.venv}/bin/python" -m megatron_rl.apps.tasks.tiny_task --output .cache/tiny_task
train engine_ranks.yaml "$@"

#!/usr/bin/env bash
# PPO with a critic on the tiny task, one response to each prompt. Further arguments override the config.
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
"${MEGATRON_RL_VENV:-.venv}/bin/python" -m megatron_rl.apps.tasks.tiny_task --output .cache/tiny_task
train critic.yaml "$@"

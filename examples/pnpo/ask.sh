#!/usr/bin/env bash
# A tiny model learns to use what its environment answers, with PNPO and four epochs. Further arguments override the config.
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
"${MEGATRON_RL_VENV:-.venv}/bin/python" -m tools.make_tool_tasks --output .cache/tool_tasks
train ask.yaml "$@"

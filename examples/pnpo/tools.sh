#!/usr/bin/env bash
# A tiny model learns to call a tool: conversations of two turns, PNPO with four epochs. Further arguments override the config.
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
"${MEGATRON_RL_VENV:-.venv}/bin/python" -m tools.make_tool_tasks --output .cache/tool_tasks
train tools.yaml "$@"

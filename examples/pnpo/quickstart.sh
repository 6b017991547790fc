#!/usr/bin/env bash
# From a clean clone to a trained tiny model: sets up, makes data and model, trains, shows curves.
# Further arguments override the config: quickstart.sh objective.name=gspo parallel.tensor=2 parallel.context=1
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
[[ -n ${LAUNCH:-} ]] || exec "${MEGATRON_RL_VENV:-.venv}/bin/megatron-rl" quickstart "$@"
"${MEGATRON_RL_VENV:-.venv}/bin/python" -m megatron_rl.apps.tasks.tiny_task --output .cache/tiny_task
train quickstart.yaml "$@"

#!/usr/bin/env bash
# From a clean clone to a trained tiny model: sets up, makes data and model, trains, shows curves.
# Further arguments override the config: quickstart.sh objective.name=gspo parallel.tensor=2 parallel.context=1
set -euo pipefail
cd "$(dirname "$0")/../.."

bash tools/setup_env.sh
source "${MEGATRON_RL_VENV:-.venv}/bin/activate"
python tools/make_tiny_task.py --output .cache/tiny_task
exec megatron-rl train --config examples/pnpo/quickstart.yaml "$@"

#!/usr/bin/env bash
# Run every CUDA-only path once and print a table; the first thing to run on a machine with a GPU.
set -euo pipefail
unset CDPATH # `cd` would print, or go elsewhere
cd "$(dirname "$0")/.."
python="${MEGATRON_RL_VENV:-.venv}/bin/python"
[ -x "$python" ] || python=python3
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # a container may keep Megatron there
exec "$python" -m tools.gpu_check "$@"

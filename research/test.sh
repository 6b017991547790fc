#!/usr/bin/env bash
# Recompute the stored results and test the study runner, in the environment of tools/setup_env.sh.
set -euo pipefail
unset CDPATH # `cd` would print, or go elsewhere
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
bash tools/setup_env.sh
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
exec "${MEGATRON_RL_VENV:-$ROOT/.venv}/bin/python" -m pytest research/tests -n 2 --dist loadfile "$@"

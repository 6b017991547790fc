#!/usr/bin/env bash
# Make a folder with everything that a machine without network needs (docs/offline.md).
#
#   bash tools/offline_bundle.sh FOLDER [--kind cuda] [--python 3.12] [--max-mib 64]
set -euo pipefail
unset CDPATH # `cd` would print, or go elsewhere
cd "$(dirname "$0")/.."
python="${MEGATRON_RL_VENV:-.venv}/bin/python"
[ -x "$python" ] || python=python3
exec env PYTHONPATH="$PWD" "$python" -m tools.offline_bundle "$@"

#!/usr/bin/env bash
# Train on the rollouts of a run, without an engine: offline.sh [RUN_DIRECTORY] [key=value ...],
# by default the newest run of examples/pnpo/quickstart.sh.
source "$(dirname "$0")/launch.sh"

run=$(ls -dt runs/quickstart-* 2>/dev/null | head -n 1 || true)
if [[ $# -gt 0 && $1 != *=* ]]; then
  run=$1
  shift
fi
train offline.yaml "offline.rollouts=${run:-runs/quickstart}" "$@"

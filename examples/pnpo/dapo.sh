#!/usr/bin/env bash
# DAPO's recipe on the quickstart's task, on one process. Further arguments override the config.
# First bash examples/pnpo/quickstart.sh, which makes data and model.
source "$(dirname "$0")/launch.sh"

train dapo.yaml "$@"

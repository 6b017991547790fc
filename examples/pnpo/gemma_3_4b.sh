#!/usr/bin/env bash
# The text model of Gemma-3-4B-it, four epochs, 16 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train gemma_3_4b.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

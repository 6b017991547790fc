#!/usr/bin/env bash
# Moonlight-16B-A3B-Instruct, four epochs, 8 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train moonlight_16b_a3b.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

#!/usr/bin/env bash
# Qwen2.5-32B, four epochs, 64 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train qwen2_5_32b.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

#!/usr/bin/env bash
# Qwen2.5-7B, four epochs, 32 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train qwen2_5_7b.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

#!/usr/bin/env bash
# Qwen3-30B-A3B, a mixture of experts, four epochs, 32 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train qwen3_30b_a3b.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

#!/usr/bin/env bash
# Qwen3-235B-A22B, a mixture of experts, four epochs, 256 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train qwen3_235b_a22b.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

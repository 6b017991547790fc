#!/usr/bin/env bash
# Qwen2.5-32B, adapters of rank 32, four epochs, 8 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train qwen2_5_32b_lora.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

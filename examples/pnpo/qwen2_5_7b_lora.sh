#!/usr/bin/env bash
# Qwen2.5-7B, adapters of rank 32, four epochs, one device of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train qwen2_5_7b_lora.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

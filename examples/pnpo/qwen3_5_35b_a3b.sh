#!/usr/bin/env bash
# Qwen3.5-35B-A3B, gated delta nets and experts, four epochs, 32 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train qwen3_5_35b_a3b.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

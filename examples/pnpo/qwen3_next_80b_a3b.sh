#!/usr/bin/env bash
# Qwen3-Next-80B-A3B, gated delta nets and experts, four epochs, 64 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train qwen3_next_80b_a3b.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

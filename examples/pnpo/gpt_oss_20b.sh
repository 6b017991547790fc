#!/usr/bin/env bash
# gpt-oss-20b in bfloat16, four epochs, 32 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train gpt_oss_20b.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

#!/usr/bin/env bash
# The paper's one-epoch setting, 32 devices: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train r1_distill_1_5b_epochs1.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

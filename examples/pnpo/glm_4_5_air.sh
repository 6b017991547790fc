#!/usr/bin/env bash
# GLM-4.5-Air, a mixture of experts, four epochs, 64 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train glm_4_5_air.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

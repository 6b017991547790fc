#!/usr/bin/env bash
# Mistral-7B-Instruct-v0.3, four epochs, 32 devices of 80 GB: OBJECTIVE=pnpo (the default), gspo or grpo.
source "$(dirname "$0")/launch.sh"
train mistral_7b.yaml objective.name="${OBJECTIVE:-pnpo}" "$@"

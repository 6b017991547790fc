#!/usr/bin/env bash
# Fine-tune a random tiny model on worked solutions: sft.sh [key=value ...]. Then, with RL:
#   bash examples/pnpo/quickstart.sh run.name=after_sft model.path=runs/sft/model objective.name=gspo trainer.steps=24
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
"${MEGATRON_RL_VENV:-.venv}/bin/python" -m megatron_rl.apps.tasks.tiny_task --supervised --output .cache/tiny_sft
train sft.yaml run.name=sft "$@"

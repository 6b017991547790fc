#!/usr/bin/env bash
# Train a pretrained model of 135 M parameters: sets up, fetches the model by pip, makes questions, trains, shows what it learned.
# The same command continues an interrupted run. Further arguments override the config.
source "$(dirname "$0")/launch.sh"

bash tools/setup_env.sh
"${MEGATRON_RL_VENV:-.venv}/bin/python" -m megatron_rl.apps.tasks.real_model --output .cache/real_model
if [[ ${LAUNCH:-} != slurm ]] && ! nvidia-smi -L >/dev/null 2>&1 && ! grep -qs bf16 /proc/cpuinfo; then
    echo "this processor has no instructions for bfloat16: trainer.dtype=float32" >&2
    set -- trainer.dtype=float32 "$@"
fi
train real_model.yaml "$@"

# The CUDA environment of tools/setup_env.sh in an image:
#
#   docker build --tag megatron-rl .
#   docker run --rm --gpus all --ipc host megatron-rl bash tools/gpu_check.sh
#
# torch's wheels bring the CUDA libraries; what is compiled here is megatron-core's small helper.
# Transformer Engine is built on a machine with its compiler: `megatron-rl doctor` says how.
FROM python:3.12-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git ninja-build \
    && rm -rf /var/lib/apt/lists/*

ENV MEGATRON_RL_VENV=/opt/megatron_rl PIP_NO_CACHE_DIR=1
WORKDIR /workspace/megatron_rl
COPY . .
# A build sees no device: an nvidia-smi that answers makes the set-up take the CUDA builds.
RUN printf '#!/bin/sh\n' > /usr/local/bin/nvidia-smi \
    && chmod +x /usr/local/bin/nvidia-smi \
    && bash tools/setup_env.sh \
    && rm /usr/local/bin/nvidia-smi
ENV PATH=/opt/megatron_rl/bin:$PATH
CMD ["megatron-rl", "doctor"]

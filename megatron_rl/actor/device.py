"""The device that this process computes on."""

import os

import torch


def has_cuda() -> bool:
    """Return True if this process computes on a CUDA device."""
    return torch.cuda.is_available()


def local_device() -> torch.device:
    """Return the CUDA device of this process's local rank, or the CPU."""
    if not has_cuda():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

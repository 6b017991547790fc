"""Asynchronous copies from the host to the device."""

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` to `device` without blocking the host."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()  # a copy from pageable memory would block
    return values.to(device, non_blocking=True)

"""From the host to the device without a wait."""

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`; the host goes on at once."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()  # a copy from pageable memory would wait for the device
    return values.to(device, non_blocking=True)

"""Biases by which routers choose experts (arXiv 2408.15664), constant in training.

Megatron's own setting also counts tokens in every pass, sums them over ranks after every update
and moves the biases towards equal loads. Here a router has only the buffer, which Megatron's
routing and checkpoints use. It is float32 in models of any dtype.
"""

import torch
from megatron.core.transformer.moe.router import TopKRouter


def add_expert_biases(model: torch.nn.Module) -> None:
    """Give every router a zero bias for each expert."""
    for router in model.modules():
        if isinstance(router, TopKRouter):
            zeros = torch.zeros(
                router.num_experts, dtype=torch.float32, device=router.weight.device
            )
            del router.expert_bias
            router.register_buffer("expert_bias", zeros)

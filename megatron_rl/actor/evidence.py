"""What an update can be judged by when its gradient is there and no weight has moved yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from megatron_rl.actor.memory import optimizer_parts
from megatron_rl.actor.model import PolicyModel
from megatron_rl.objectives.statistics import Statistics


@dataclass(frozen=True)
class Evidence:
    """The same on every rank."""

    statistics: Statistics  # of the whole minibatch
    head_energy: Callable[[], float]  # `head_gradient_energy`; collective


Rule = Callable[[Evidence], str | None]  # why the update is not to be made, None if it is


def head_gradient_energy(
    chunks: Sequence[PolicyModel], optimizer: MegatronOptimizer, *, device: torch.device
) -> float:
    """The squared norm of the output layer's gradient, before clipping; collective.

    Of the embedding too where the model ties both. Each rank squares the part of the summed
    gradient that its optimizer owns.
    """
    energy = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in chunks:
        if not chunk.post_process:
            continue
        tied = chunk.share_embeddings_and_output_weights
        head = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
        for part in optimizer_parts(optimizer):
            owned = _owned_range(part, head)
            if owned is not None:
                energy += head.main_grad.view(-1)[owned].double().square().sum()
    if dist.is_initialized():
        dist.all_reduce(energy)
    return float(energy)


def _owned_range(optimizer: MegatronOptimizer, parameter: torch.Tensor) -> slice | None:
    """What a distributed optimizer's rank owns of a parameter, as a slice of it, flat."""
    place = getattr(optimizer, "model_param_gbuf_map", {}).get(parameter)
    if place is None:
        return None
    buffer, dtype, bucket = place
    ranges = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"].get(parameter)
    return None if ranges is None else slice(ranges["param"].start, ranges["param"].end)

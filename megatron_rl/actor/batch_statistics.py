"""Statistics of a minibatch: those that some objectives need before it, and those of its update."""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.collectives import Group, gather_ragged, reduce_sum
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives.objective import PolicyObjective, sign_noise
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.types import TokenBatch


def resolve_objective(
    objective: PolicyObjective,
    micro_batches: Sequence[TokenBatch],
    compute_logprobs: Callable[[Sequence[TokenBatch]], list[Tensor]],
    *,
    group: Group,
    device: torch.device,
) -> PolicyObjective:
    """Return the objective with its minibatch statistics filled in.

    micro_batches: this rank's; the minibatch spans the ranks of `group`. Depending on the objective
    this is a no-op, a sum of two numbers over the group, or an additional forward pass; the latter
    two are collective.
    """
    if objective.is_balanced:
        noise = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in micro_batches:
            advantages, behavior = _own(batch, device)
            noise += sign_noise(advantages, behavior)
        objective = objective.balance(reduce_sum(noise, group=group))
    if objective.is_resolved:
        return objective
    rows = []
    for batch, logprobs in zip(micro_batches, compute_logprobs(micro_batches), strict=True):
        advantages, behavior = _own(batch, logprobs.device)
        mask = batch.response_mask.to(logprobs.device)
        rows.append((logprobs[mask] - behavior, advantages, behavior))
    columns = (torch.cat(column) for column in zip(*rows, strict=True))
    return objective.resolve(*(gather_ragged(column, group=group) for column in columns))


def _own(batch: TokenBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return advantages and behavior log-probs of a pack's response tokens; [N] each."""
    assert batch.behavior_logprobs is not None, "compute behavior log-probs before the update"
    mask = batch.response_mask.to(device)
    advantages, behavior = batch.advantages_per_token(), batch.behavior_logprobs
    return advantages.to(device)[mask], behavior.to(device)[mask]


def reduce_statistics(
    reports: Sequence[Statistics], *, classes: int, topology: Topology
) -> Statistics:
    """Reduce the last stage's statistics over the minibatch and return them on every rank.

    They decide rates and stops, so every rank needs the same bits. A device adds in any order, so
    tensor parallel ranks take the sums of their first rank, and stages those of the last.
    """
    total = Statistics.empty(topology.device, classes=classes)
    if topology.is_last_stage:
        total = reduce(Statistics.merge, reports, total).all_reduce(topology.dp_cp_group)
    for group, size, source in (
        (topology.tp_group, topology.tp_size, 0),
        (topology.pp_group, topology.pp_size, topology.pp_size - 1),
    ):
        for part in total.tensors if size > 1 else ():
            dist.broadcast(part, group=group, group_src=source)
    return total

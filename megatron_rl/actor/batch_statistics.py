"""Minibatch statistics that some objectives need before the first micro-batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, gather_ragged, reduce_sum
from megatron_rl.objectives.objective import PolicyObjective, sign_noise
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

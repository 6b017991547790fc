"""Objectives whose constraint depends on a whole minibatch, before its first micro-batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, gather_ragged
from megatron_rl.objectives.objective import PolicyObjective
from megatron_rl.types import TokenBatch


def fit_objective(
    objective: PolicyObjective,
    micro_batches: Sequence[TokenBatch],
    compute_logprobs: Callable[[Sequence[TokenBatch]], list[Tensor]],
    *,
    group: Group,
) -> PolicyObjective:
    """The objective for this minibatch, whose other micro-batches are with the group's ranks.

    A forward pass more, where the objective asks for one; collective then.
    """
    if objective.is_fitted:
        return objective
    log_ratios, advantages = [], []
    for batch, logprobs in zip(micro_batches, compute_logprobs(micro_batches), strict=True):
        assert batch.behavior_logprobs is not None, "behavior log-probs come before the update"
        own = batch.response_mask.to(logprobs.device)
        log_ratios.append((logprobs - batch.behavior_logprobs.to(logprobs.device))[own])
        advantages.append(batch.advantages_per_token().to(logprobs.device)[own])
    columns = (torch.cat(column) for column in (log_ratios, advantages))
    return objective.fit(*(gather_ragged(column, group=group) for column in columns))

"""Values of a rollout batch by a critic, and the advantages that follow from them.

A reward belongs to the decision that it follows: that of a turn to its last token, and what
`shaping` adds to the last turn's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.critic import Critic
from megatron_rl.advantages import EPSILON
from megatron_rl.config import Config
from megatron_rl.data.packing import FILLER, gather_by_rollout, scatter_to_packs
from megatron_rl.distributed.agreement import gather_from_ranks
from megatron_rl.distributed.collectives import Group, reduce_sum
from megatron_rl.objectives.values import GaeSettings
from megatron_rl.rollouts.groups import is_truncated, turn_rewards
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.types import Minibatch, PromptGroup, Rollout


def token_rewards(rollout: Rollout, config: Config) -> np.ndarray:
    """Return the reward that follows each sampled token; [L] float32."""
    rewards = np.zeros(rollout.response.length, np.float64)
    if len(rewards):
        np.add.at(rewards, _last_tokens(rollout), turn_rewards(rollout, config))
    return rewards.astype(np.float32)


def ends_of_turns(rollout: Rollout) -> np.ndarray:
    """Return True for the last sampled token of each turn of the policy; [L] bool."""
    ends = np.zeros(rollout.response.length, bool)
    if len(ends):
        ends[_last_tokens(rollout)] = True
    return ends


def _last_tokens(rollout: Rollout) -> np.ndarray:
    """Return the last sampled token of each turn, of one without tokens that before it; [turns]."""
    return np.maximum(np.cumsum(rollout.response.turn_lengths) - 1, 0)


def score_values(
    batch: RolloutBatch, critic: Critic, config: Config, *, resumed: bool = False
) -> RolloutBatch:
    """Return the batch with values, returns and advantages for all its updates; collective.

    Groups that an earlier step trained get the values of the present critic, which knows more: a
    baseline may be any function of what came before a token. resumed: use the values of the groups,
    with which a part of the updates was made.
    """
    assert config.critic is not None, "a critic has its section"
    if not resumed:
        batch = batch.with_columns(values=[None] * len(batch.packs))
    packs, rollouts = batch.packs, batch.rollouts
    rewards: list[np.ndarray | None] = [None] * len(rollouts)
    ends: list[np.ndarray | None] = [None] * len(rollouts)
    for index in batch.own_rollouts:
        rewards[index] = token_rewards(rollouts[index], config)
        ends[index] = ends_of_turns(rollouts[index]).astype(np.float32)
    cut = [
        torch.tensor([i != FILLER and is_truncated(rollouts[i]) for i in pack.rollout_indices])
        for pack in packs
    ]
    targets = critic.compute_targets(
        packs,
        scatter_to_packs(packs, rewards),
        [one.bool() for one in scatter_to_packs(packs, ends)],
        cut,
        settings=GaeSettings.of(config.critic),
    )
    columns = [[one[:, place].contiguous() for one in targets] for place in range(3)]
    values, advantages, returns = columns
    batch = batch.with_columns(values=values, turn_advantages=advantages, returns=returns)
    batch = replace(batch, groups=_record(batch, critic))
    if not config.critic.whiten:
        return batch
    whitened = [
        one for each in batch.minibatches for one in whiten(each, group=critic.topology.dp_group)
    ]
    return batch.with_columns(turn_advantages=whitened)


def _record(batch: RolloutBatch, critic: Critic) -> list[PromptGroup]:
    """Return the groups with their values, and with mean advantages of their responses."""
    rollouts = batch.rollouts
    rows = iter(
        gather_by_rollout(
            batch.packs,
            [pack.values for pack in batch.packs if pack.values is not None],
            count=len(rollouts),
            topology=critic.topology,
            owners=[rollout.response.owner for rollout in rollouts],
        )
    )
    means = np.zeros(len(rollouts), np.float32)
    for own in gather_from_ranks(_mean_advantages(batch)):
        for index, mean in own.items():
            means[index] = mean
    by_group = iter(means)
    return [
        replace(
            group.with_column("values", [next(rows) for _ in group.rollouts]),
            advantages=np.array([next(by_group) for _ in group.rollouts], np.float32),
        )
        for group in batch.groups
    ]


def _mean_advantages(batch: RolloutBatch) -> dict[int, float]:
    """Mean over the sampled tokens of each rollout in this rank's packs."""
    means = {}
    for pack in batch.packs:
        assert pack.turn_advantages is not None
        parts = pack.turn_advantages.cpu().double().split(list(pack.lengths))
        masks = pack.response_mask.cpu().split(list(pack.lengths))
        for index, part, mask in zip(pack.rollout_indices, parts, masks, strict=True):
            if index != FILLER and mask.any():
                means[index] = float(part[mask].mean())
    return means


def whiten(minibatch: Minibatch, *, group: Group) -> list[Tensor]:
    """Return a minibatch's advantages with mean 0 and deviation 1, [T] of each pack; collective.

    A = (A - mean) / (std + 1e-6), over the sampled tokens of all data-parallel ranks.
    """
    packs = minibatch.micro_batches
    own = [_decided(pack.turn_advantages, pack.response_mask) for pack in packs]
    x = torch.cat(own).double()
    sums = reduce_sum(torch.stack((x.new_tensor(len(x)), x.sum(), x.square().sum())), group=group)
    count, total, squares = sums.tolist()
    mean = total / max(count, 1)
    deviation = max(squares / max(count, 1) - mean**2, 0.0) ** 0.5
    whitened = []
    for pack in packs:
        assert pack.turn_advantages is not None
        scaled = (pack.turn_advantages.double() - mean) / (deviation + EPSILON)
        mask = pack.response_mask.to(scaled.device)
        whitened.append(torch.where(mask, scaled, 0).float())
    return whitened


def _decided(values: Tensor | None, mask: Tensor) -> Tensor:
    assert values is not None, "compute targets first"
    return values[mask.to(values.device)]

"""History of log-probs: those of a few responses at every update of their rollout batch.

Every update computes the policy's log-probs anyway; for the traced responses they are kept.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.collectives import group_size
from megatron_rl.distributed.topology import Topology
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import PromptGroup, Rollout, TokenBatch


def choose_traced(
    rollouts: Sequence[Rollout], computed: Sequence[bool], *, count: int, seed: int
) -> list[int]:
    """Positions of `count` computed responses: whole groups in a random order of prompts.

    The order depends only on seed and prompt: other runs with the seed trace the same prompts if
    they compute them, and a prompt that is used again is likely to be traced again.
    """
    lots = {r.prompt.index: derive_seed(seed, "traced", r.prompt.index) for r in rollouts}
    places = [place for place, is_computed in enumerate(computed) if is_computed]
    places.sort(key=lambda place: (lots[rollouts[place].prompt.index], place))
    return sorted(places[:count])


def choose_sampled(
    groups: Sequence[PromptGroup], traced: Sequence[int], *, count: int, seed: int
) -> list[bool]:
    """[N] mask of the rollouts of a step that `logging.keep_rollouts` keeps.

    These are whole groups: those of the traced responses, and at random, whatever their rewards, as
    many as have `count` responses, at least one.
    """

    def sampling_key(place: int) -> tuple[int, int]:
        return derive_seed(seed, "traced", groups[place].rollouts[0].prompt.index), place

    group_of = [place for place, group in enumerate(groups) for _ in group.rollouts]
    size = len(groups[0].rollouts)
    drawn = sorted(range(len(groups)), key=sampling_key)[: max(1, -(-count // size))]
    chosen = {*drawn, *(group_of[place] for place in traced)}
    return [place in chosen for place in group_of]


def mark_traced(packs: Sequence[TokenBatch], places: Sequence[int]) -> None:
    """Make the actor keep log-probs of the packs that contain one of the rollouts."""
    for pack in packs:
        if not set(places).isdisjoint(pack.rollout_indices):
            pack.traced_logprobs = []


def gather_traces(
    packs: Sequence[TokenBatch], places: Sequence[int], *, topology: Topology
) -> dict[int, np.ndarray]:
    """Log-probs of the traced rollouts at each of their updates, [updates, L], by position.

    Collective over data and context parallelism if any rollout is traced.
    """
    if not places:
        return {}
    mine: dict[int, np.ndarray] = {}
    for pack in packs:
        if not pack.traced_logprobs:
            continue
        values = torch.stack(pack.traced_logprobs).float().cpu()  # [updates, T]
        masks = pack.response_mask.cpu().split(list(pack.lengths))
        parts = values.split(list(pack.lengths), dim=1)
        for place, mask, part in zip(pack.rollout_indices, masks, parts, strict=True):
            if place in places:
                mine[place] = part[:, mask].numpy()
    everyone = [mine] * group_size(topology.host_group)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine, group=topology.host_group)
    return {place: values for some in everyone for place, values in some.items()}


def restore_traces(packs: Sequence[TokenBatch], traces: Mapping[int, np.ndarray]) -> None:
    """Restore the result of `gather_traces` in packs, so that later updates append to it."""
    for pack in packs:
        rows = {i: traces[p] for i, p in enumerate(pack.rollout_indices) if p in traces}
        if pack.traced_logprobs is None or not rows:
            continue
        for update in range(len(next(iter(rows.values())))):
            values = torch.zeros(pack.response_mask.shape, device=pack.response_mask.device)
            parts = values.split(list(pack.lengths))
            masks = pack.response_mask.split(list(pack.lengths))
            for i, row in rows.items():
                parts[i][masks[i]] = torch.from_numpy(row[update].copy()).to(values.device)
            pack.traced_logprobs.append(values)

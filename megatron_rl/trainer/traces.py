"""Which responses of a rollout batch are followed through its reuse, and what was seen of them.

Every update computes the policy's log-probs anyway; of a few responses they are kept.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.distributed.topology import Topology
from megatron_rl.seeds import derive_seed
from megatron_rl.types import Rollout, TokenBatch


def choose_traced(
    rollouts: Sequence[Rollout], computed: Sequence[bool], *, count: int, seed: int
) -> list[int]:
    """Places of `count` computed responses: groups by the lot of their prompt, each in order.

    The lot depends on seed and prompt alone: another run of the seed traces the same prompts, as
    far as it computes them, and a prompt that comes again is likely to be traced again.
    """
    lots = {r.prompt.index: derive_seed(seed, "traced", r.prompt.index) for r in rollouts}
    places = [place for place, is_computed in enumerate(computed) if is_computed]
    places.sort(key=lambda place: (lots[rollouts[place].prompt.index], place))
    return sorted(places[:count])


def mark_traced(packs: Sequence[TokenBatch], places: Sequence[int]) -> None:
    """Ask the actor to keep the log-probs of the packs that hold one of the rollouts."""
    for pack in packs:
        if not set(places).isdisjoint(pack.rollout_indices):
            pack.traced_logprobs = []


def gather_traces(
    packs: Sequence[TokenBatch], places: Sequence[int], *, topology: Topology
) -> dict[int, np.ndarray]:
    """The traced rollouts' log-probs at each of their updates, [updates, L], by place.

    Collective over data parallelism, where anything is traced.
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
    everyone = [mine] * topology.dp_size
    if topology.dp_size > 1:
        dist.all_gather_object(everyone, mine, group=topology.dp_group)
    return {place: values for some in everyone for place, values in some.items()}


def restore_traces(packs: Sequence[TokenBatch], traces: Mapping[int, np.ndarray]) -> None:
    """Give packs what `gather_traces` took from them, so that the updates to come add to it."""
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

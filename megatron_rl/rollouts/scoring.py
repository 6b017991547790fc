"""Scoring of a rollout batch by models: each function returns a batch with further columns.

A column is written once: log-probs of the behavior policy when the rollouts are generated,
log-probs of references and centers in the step that trains them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.reference import ReferencePolicy, References
from megatron_rl.data.packing import FILLER, gather_by_rollout
from megatron_rl.distributed.collectives import reduce_sum
from megatron_rl.rollouts.rollout_batch import RolloutBatch


def score_behavior(batch: RolloutBatch, model: MegatronActor | ReferencePolicy) -> RolloutBatch:
    """Compute behavior log-probs and entropy with the policy that generated; collective.

    This uses the packs of training, if it trains these groups together: ratios in the first
    minibatch are then exactly 1. The actor also records which experts its tokens use.
    """
    packs, changed = batch.packs, batch.engine_routes_changed
    if isinstance(model, MegatronActor):
        use_engine_routes(batch, model)
        scored = model.compute_logprobs_and_entropies(packs, routing="record")
        if batch.replays_engine:  # nothing was updated: the changes are those to the engine
            changed = model.routing.pop_counts()
    else:
        scored = model.compute_logprobs_and_entropies(packs)
    logprobs = [one for one, _ in scored]
    rows = gather_by_rollout(
        packs,
        logprobs,
        count=len(batch.computed),
        topology=batch.topology,
        owners=[rollout.response.owner for rollout in batch.rollouts],
    )
    entropy = _mean(batch, [entropies for _, entropies in scored])
    batch = batch.with_columns(behavior_logprobs=logprobs)
    batch = batch.with_group_rows("behavior_logprobs", rows)
    return replace(
        batch,
        groups=[replace(group, entropy=entropy) for group in batch.groups],
        is_exact=True,
        engine_routes_changed=changed,
    )


def score_behavior_by_engine(batch: RolloutBatch) -> RolloutBatch:
    """Use the engine's log-probs as the behavior policy's log-probs."""
    batch = batch.with_columns(behavior_logprobs=[pack.rollout_logprobs for pack in batch.packs])
    rows = [rollout.response.rollout_logprobs for rollout in batch.rollouts]
    return batch.with_group_rows("behavior_logprobs", rows)


def center_on(batch: RolloutBatch, actor: MegatronActor) -> RolloutBatch:
    """Use ratios to the policy before this step's first update (decoupled objectives).

    The objective corrects from the engine's log-probs, which the groups keep, to that policy.
    """
    centered = batch.with_columns(behavior_logprobs=actor.compute_logprobs(batch.packs))
    return replace(centered, is_exact=True)


def score_references(
    batch: RolloutBatch,
    references: References,
    *,
    whole_vocabulary: bool,
    top_k: int | None = None,
) -> RolloutBatch:
    """Compute what a KL term needs of the reference policies; collective.

    Raises UserError, on every rank, for a response whose data source has no reference.
    """
    by_rollout = [rollout.prompt.data_source for rollout in batch.rollouts]
    references.check_sources(by_rollout)
    sources = [
        [None if index == FILLER else by_rollout[index] for index in pack.rollout_indices]
        for pack in batch.packs
    ]
    if not whole_vocabulary:
        logprobs = references.compute_logprobs(batch.packs, sources)
        return batch.with_columns(reference_logprobs=logprobs)
    heads = references.compute_head_inputs(batch.packs, sources, top_k=top_k)
    return batch if heads is None else batch.with_columns(reference_head=heads)


def record_routes(batch: RolloutBatch, actor: MegatronActor) -> None:
    """Record the experts of packs whose log-probs an ended run computed; collective.

    The actor must have the weights that computed them.
    """
    use_engine_routes(batch, actor)
    if actor.routing.is_active and any(pack.routes is None for pack in batch.packs):
        actor.compute_logprobs(batch.packs, routing="record")


def use_engine_routes(batch: RolloutBatch, actor: MegatronActor) -> None:
    """Make packs replay the engine's experts, with `model.routing_replay: engine`."""
    if batch.replays_engine:
        actor.routing.use_engine_routes(batch.packs, lambda pack: actor.packs.prepare(pack).host)


def _mean(batch: RolloutBatch, values: Sequence[Tensor]) -> float:
    """Mean over the response tokens of all packs, nan without any; collective."""
    total = torch.stack([value.double().sum() for value in values]).sum()
    count = sum(int(pack.response_mask.sum()) for pack in batch.packs)
    sums = reduce_sum(
        torch.stack((total, torch.full_like(total, count))), group=batch.topology.dp_group
    )
    return float(sums[0] / sums[1])

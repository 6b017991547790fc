"""The rollout batch of one step: prompt groups, packs and frozen behavior log-probs.

Every update computes the policy's log-probs anyway; for a few traced responses they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.actor.settings import GEMM_TOKENS
from megatron_rl.config import Config
from megatron_rl.data.packing import (
    FILLER,
    plan_minibatches,
    scatter_to_packs,
    sequence_length,
)
from megatron_rl.data.sharing import Sharing
from megatron_rl.distributed.collectives import group_size, reduce_sum
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import PolicyObjective
from megatron_rl.rollouts.groups import is_masked, shape_reward
from megatron_rl.rollouts.schedule import token_versions
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import Minibatch, PromptGroup, Rollout, Row, TokenBatch


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


@dataclass(frozen=True)
class RolloutBatch:
    """Groups that one step trains, and packs of their tokens.

    The same on every rank, except where the tokens and their log-probs are (`types.Response`).
    What is computed for it (`rollouts/scoring.py`) gives another batch with further columns; only
    what passes record as they go, experts and traced log-probs, is put into the packs.
    """

    groups: list[PromptGroup]
    computed: list[bool]  # [N] rollouts that are in packs
    minibatches: list[Minibatch]  # this data-parallel rank's packs
    topology: Topology
    is_exact: bool = False  # ratios are exactly 1 until the first update
    lags: tuple[int, ...] = ()  # weight versions behind, of the classes of tokens in metrics
    engine_seconds: Sequence[float] = ()  # of each engine, if the groups were just generated
    traced: Sequence[int] = ()  # positions of rollouts whose log-probs are kept at each update
    shaped: Sequence[float] = ()  # [N] rewards that are trained on
    masked: Sequence[bool] = ()  # [N] rollouts that are not trained
    replays_engine: bool = False  # the engine's routes are those of the behavior pass
    engine_routes_changed: Tensor | None = None  # as of `RoutingRecorder.pop_counts`
    shared_rows: float = 0.0  # fraction of the packs' rows that sharing prompts saves

    @property
    def rollouts(self) -> list[Rollout]:
        """N, group after group."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def advantages(self) -> Tensor:
        """[groups, responses to each] float32."""
        return torch.from_numpy(np.stack([group.advantages for group in self.groups]))

    @property
    def turn_advantages(self) -> list[np.ndarray]:
        """[N] arrays over the turns of each response; empty without `advantage.credit=turn`."""
        return [row for group in self.groups for row in group.turn_advantages]

    @property
    def learns(self) -> Tensor:
        """True where some turn has an advantage other than 0; [groups, responses to each] bool."""
        return torch.tensor([group.learns for group in self.groups])

    @property
    def behavior_logprobs(self) -> list[np.ndarray | None]:
        """[N] arrays over response tokens, where the response's are; None if not computed."""
        return [row for group in self.groups for row in group.behavior_logprobs]

    def lag(self, step: int) -> list[int]:
        """[N] steps between each rollout's generation and step `step`."""
        return [step - group.generated_at_step for group in self.groups for _ in group.rollouts]

    @property
    def packs(self) -> list[TokenBatch]:
        """This data-parallel rank's micro-batches of all minibatches, in order."""
        return [pack for minibatch in self.minibatches for pack in minibatch.micro_batches]

    @property
    def own_rollouts(self) -> list[int]:
        """Indices of the rollouts in this data-parallel rank's packs."""
        return [i for pack in self.packs for i in pack.rollout_indices if i != FILLER]

    def with_columns(self, **columns: Sequence[Any]) -> RolloutBatch:
        """Return the batch with other values in its packs: for each name, one for each pack."""
        names, each = list(columns), zip(*columns.values(), strict=True)
        minibatches = [
            replace(
                minibatch,
                micro_batches=[
                    replace(pack, **dict(zip(names, next(each), strict=True)))
                    for pack in minibatch.micro_batches
                ],
            )
            for minibatch in self.minibatches
        ]
        assert next(each, None) is None, "one value for each pack"
        return replace(self, minibatches=minibatches)

    def with_group_rows(self, name: str, rows: Sequence[Row]) -> RolloutBatch:
        """Return the batch with another column of its groups: [N] one row for each rollout."""
        each = iter(rows)
        groups = [g.with_column(name, [next(each) for _ in g.rollouts]) for g in self.groups]
        return replace(self, groups=groups)

    def by_lag(self, step: int) -> RolloutBatch:
        """Return the batch with classes of its tokens: how many weight versions they are behind.

        Updates then report metrics by class. There is one class, which is not reported, if no token
        is behind, and none if another run generated the rollouts.
        """
        responses = [rollout.response for rollout in self.rollouts]
        versions = {version for one in responses for _, version in one.versions}
        if min(versions) < 0:
            return self
        lags = tuple(sorted(step - 1 - version for version in versions))
        if lags == (0,):
            return replace(self, lags=lags)
        rows: list[np.ndarray | None] = [None] * len(responses)
        for index in self.own_rollouts:
            lag = step - 1 - token_versions(responses[index])
            rows[index] = np.searchsorted(lags, lag).astype(np.float32)
        values = scatter_to_packs(self.packs, rows)
        batch = self.with_columns(classes=[row.long() for row in values])
        minibatches = [replace(one, classes=len(lags)) for one in batch.minibatches]
        return replace(batch, lags=lags, minibatches=minibatches)

    def with_turn_advantages(self) -> RolloutBatch:
        """Return the batch whose packs give each token the advantage of its turn."""
        rows: list[np.ndarray | None] = [None] * len(self.computed)
        responses, advantages = [one.response for one in self.rollouts], self.turn_advantages
        for index in self.own_rollouts:
            rows[index] = np.repeat(advantages[index], responses[index].turn_lengths)
        return self.with_columns(turn_advantages=scatter_to_packs(self.packs, rows))

    def with_shared_rows(self) -> RolloutBatch:
        """Return the batch with the fraction of rows that common beginnings save; collective."""
        apart = sum(sequence_length(self.rollouts[index]) for index in self.own_rollouts)
        rows = sum(
            sum(pack.used)
            if pack.parents
            else sum(
                sequence_length(self.rollouts[index])
                for index in pack.rollout_indices
                if index != FILLER
            )
            for pack in self.packs
        )
        sums = torch.tensor([rows, apart], dtype=torch.float64, device=self.topology.device)
        rows, apart = reduce_sum(sums, group=self.topology.dp_group).tolist()
        return replace(self, shared_rows=1 - rows / apart if apart else 0.0)

    def traces(self) -> dict[int, np.ndarray]:
        """Log-probs of the traced rollouts at each of their updates so far; collective."""
        return gather_traces(self.packs, self.traced, topology=self.topology)


def build_rollout_batch(
    groups: Sequence[PromptGroup],
    *,
    config: Config,
    objective: PolicyObjective,
    topology: Topology,
    sharing: Sharing | None = None,
    engine_seconds: Sequence[float] = (),
) -> RolloutBatch:
    """Pack groups with their frozen log-probs; collective.

    Rollouts without an advantage other than 0 are packed only if the objective needs them: their
    gradient is 0, but the denominators count them.
    Rollouts masked by `shaping.truncated` are in neither. A partial rollout batch may have fewer
    minibatches.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    advantages = torch.from_numpy(np.concatenate([group.advantages for group in groups]))
    # With a critic, values and so advantages follow once the rollouts are packed.
    all_computed = objective.uses_zero_advantage or config.critic is not None
    counted = [not is_masked(rollout, config) for rollout in rollouts]
    learns = [one for group in groups for one in group.learns]
    computed = [one and (all_computed or own) for one, own in zip(counted, learns, strict=True)]
    minibatches = plan_minibatches(
        rollouts,
        advantages,
        minibatches=math.gcd(len(groups), config.trainer.minibatches),
        tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
        topology=topology,
        gemm_tokens=GEMM_TOKENS[config.model.fp8],
        computed=computed,
        counted=counted,
        sharing=sharing,
    )
    traced = choose_traced(
        rollouts, computed, count=config.logging.traced_responses, seed=config.seed
    )
    batch = RolloutBatch(
        list(groups),
        computed,
        minibatches,
        topology,
        engine_seconds=engine_seconds,
        traced=traced,
        shaped=[shape_reward(rollout, config) for rollout in rollouts],
        masked=[not one for one in counted],
        replays_engine=config.model.routing_replay == "engine",
    )
    mark_traced(batch.packs, traced)
    if config.sft is not None:
        batch = batch.with_columns(on_policy=[True] * len(batch.packs))
    return batch.with_turn_advantages() if batch.turn_advantages else batch

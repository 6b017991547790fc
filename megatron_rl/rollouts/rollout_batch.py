"""The rollout batch of one step: prompt groups, packs and frozen behavior log-probs.

Every update computes the policy's log-probs anyway; for a few traced responses they are kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.reference import ReferencePolicy, References
from megatron_rl.actor.settings import GEMM_TOKENS
from megatron_rl.config import Config
from megatron_rl.data.packing import (
    FILLER,
    gather_by_rollout,
    plan_minibatches,
    scatter_to_packs,
)
from megatron_rl.distributed.collectives import group_size, reduce_sum
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import PolicyObjective
from megatron_rl.rollouts.groups import is_masked, shape_reward
from megatron_rl.rollouts.schedule import token_versions
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import Minibatch, PromptGroup, Rollout, TokenBatch


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


@dataclass
class RolloutBatch:
    """Groups that one step trains, frozen while they are reused.

    The same on every rank, except where the tokens and their log-probs are (`types.Response`).
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

    def freeze_behavior_logprobs(self, actor: MegatronActor | ReferencePolicy) -> None:
        """Compute behavior log-probs and entropy with the policy that generated; collective.

        This uses the packs of training, if it trains these groups together: ratios in the first
        minibatch are then exactly 1. The actor also records which experts its tokens use.
        """
        self.is_exact = True
        if isinstance(actor, MegatronActor):
            self.use_engine_routes(actor)
            scored = actor.compute_logprobs_and_entropies(self.packs, routing="record")
            if self.replays_engine:  # nothing was updated: the changes are those to the engine
                self.engine_routes_changed = actor.routing.pop_counts()
        else:
            scored = actor.compute_logprobs_and_entropies(self.packs)
        for pack, (logprobs, _) in zip(self.packs, scored, strict=True):
            pack.behavior_logprobs = logprobs
        rows = gather_by_rollout(
            self.packs,
            [logprobs for logprobs, _ in scored],
            count=len(self.computed),
            topology=self.topology,
            owners=[rollout.response.owner for rollout in self.rollouts],
        )
        entropy = self._mean([entropies for _, entropies in scored])
        each = iter(rows)
        self.groups = [
            replace(
                group.with_column("behavior_logprobs", [next(each) for _ in group.rollouts]),
                entropy=entropy,
            )
            for group in self.groups
        ]

    def record_routes(self, actor: MegatronActor) -> None:
        """Record the experts of packs whose log-probs an ended run computed; collective.

        The actor must have the weights that computed them.
        """
        self.use_engine_routes(actor)
        if actor.routing.is_active and any(pack.routes is None for pack in self.packs):
            actor.compute_logprobs(self.packs, routing="record")

    def use_engine_routes(self, actor: MegatronActor) -> None:
        """Make packs replay the engine's experts, with `model.routing_replay: engine`."""
        if self.replays_engine:
            actor.routing.use_engine_routes(self.packs, lambda pack: actor.packs.prepare(pack).host)

    def freeze_engine_logprobs(self) -> None:
        """Use the engine's log-probs as those of the behavior policy."""
        for pack in self.packs:
            pack.behavior_logprobs = pack.rollout_logprobs
        self.groups = [
            group.with_column(
                "behavior_logprobs", [r.response.rollout_logprobs for r in group.rollouts]
            )
            for group in self.groups
        ]

    def center_on(self, actor: MegatronActor) -> None:
        """Use ratios to the policy before this step's first update (decoupled objectives).

        The objective corrects from the engine's log-probs, which the groups keep, to that policy.
        """
        self.is_exact = True
        for pack, logprobs in zip(self.packs, actor.compute_logprobs(self.packs), strict=True):
            pack.behavior_logprobs = logprobs

    def report_by_lag(self, step: int) -> None:
        """Make updates report metrics by the number of weight versions that tokens are behind.

        Does nothing if no token is behind or if another run generated the rollouts.
        """
        responses = [rollout.response for rollout in self.rollouts]
        versions = {version for one in responses for _, version in one.versions}
        if min(versions) < 0:
            return
        self.lags = tuple(sorted(step - 1 - version for version in versions))
        if self.lags == (0,):
            return
        rows: list[np.ndarray | None] = [None] * len(responses)
        for index in self.own_rollouts:
            lag = step - 1 - token_versions(responses[index])
            rows[index] = np.searchsorted(self.lags, lag).astype(np.float32)
        for pack, values in zip(self.packs, scatter_to_packs(self.packs, rows), strict=True):
            pack.classes = values.long()
        for minibatch in self.minibatches:
            minibatch.classes = len(self.lags)

    def spread_turn_advantages(self) -> None:
        """Give each token of the packs the advantage of its turn."""
        rows: list[np.ndarray | None] = [None] * len(self.computed)
        responses, advantages = [one.response for one in self.rollouts], self.turn_advantages
        for index in self.own_rollouts:
            rows[index] = np.repeat(advantages[index], responses[index].turn_lengths)
        for pack, values in zip(self.packs, scatter_to_packs(self.packs, rows), strict=True):
            pack.turn_advantages = values

    def freeze_reference(
        self, references: References, *, whole_vocabulary: bool, top_k: int | None = None
    ) -> None:
        """Compute what a KL term needs of the reference policies; collective.

        Raises UserError, on every rank, for a response whose data source has no reference.
        """
        by_rollout = [rollout.prompt.data_source for rollout in self.rollouts]
        references.check_sources(by_rollout)
        sources = [
            [None if index == FILLER else by_rollout[index] for index in pack.rollout_indices]
            for pack in self.packs
        ]
        if whole_vocabulary:
            heads = references.compute_head_inputs(self.packs, sources, top_k=top_k)
            for pack, head in zip(self.packs, heads or (), strict=heads is not None):
                pack.reference_head = head
            return
        scored = references.compute_logprobs(self.packs, sources)
        for pack, logprobs in zip(self.packs, scored, strict=True):
            pack.reference_logprobs = logprobs

    def _mean(self, values: list[Tensor]) -> float:
        """Mean over the response tokens of all packs, nan without any; collective."""
        total = torch.stack([value.double().sum() for value in values]).sum()
        count = sum(int(pack.response_mask.sum()) for pack in self.packs)
        sums = reduce_sum(
            torch.stack((total, torch.full_like(total, count))), group=self.topology.dp_group
        )
        return float(sums[0] / sums[1])

    def traces(self) -> dict[int, np.ndarray]:
        """Log-probs of the traced rollouts at each of their updates so far; collective."""
        return gather_traces(self.packs, self.traced, topology=self.topology)


def build_rollout_batch(
    groups: Sequence[PromptGroup],
    *,
    config: Config,
    objective: PolicyObjective,
    topology: Topology,
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
    all_computed = objective.uses_zero_advantage
    counted = [not is_masked(rollout, config) for rollout in rollouts]
    learns = [one for group in groups for one in group.learns]
    if config.critic is not None:
        all_computed = True  # values, and so advantages, follow once they are packed
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
        for pack in batch.packs:
            pack.on_policy = True
    if batch.turn_advantages:
        batch.spread_turn_advantages()
    return batch

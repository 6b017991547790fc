"""What is generated once and reused: groups, their advantages, packs and behavior log-probs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.actor import MegatronActor
from megatron_rl.actor.reference import ReferencePolicy
from megatron_rl.actor.settings import GEMM_TOKENS
from megatron_rl.advantages import (
    batch_baseline_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    optimal_value_advantages,
    raw_advantages,
)
from megatron_rl.config import AdvantageSection, Config
from megatron_rl.data.packing import gather_by_rollout, plan_minibatches, scatter_to_packs
from megatron_rl.distributed.collectives import reduce_sum
from megatron_rl.distributed.topology import Topology
from megatron_rl.lag.clock import token_versions
from megatron_rl.objectives import PolicyObjective
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT, UNPARSABLE_TRUTH
from megatron_rl.trainer.shaping import is_masked, shape_reward
from megatron_rl.trainer.traces import choose_traced, gather_traces, mark_traced
from megatron_rl.types import Group, Minibatch, Rollout, Slot, TokenBatch


@dataclass
class RolloutBatch:
    """What one step trains: groups, frozen while they are reused; the same ones on every rank."""

    groups: list[Group]
    computed: list[bool]  # [N] rollouts that are in packs
    minibatches: list[Minibatch]  # this data-parallel rank's packs
    topology: Topology
    is_exact: bool = False  # ratios are 1 until the first update: to the policy, on these packs
    lags: tuple[int, ...] = ()  # versions behind, of the classes that tokens are reported in
    engine_seconds: Sequence[float] = ()  # of each engine, where the groups were just generated
    traced: Sequence[int] = ()  # places of the rollouts whose log-probs every update keeps
    shaped: Sequence[float] = ()  # [N] rewards that are trained on
    masked: Sequence[bool] = ()  # [N] rollouts that nothing is learned from

    @property
    def rollouts(self) -> list[Rollout]:
        """N, group after group."""
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def advantages(self) -> Tensor:
        """[groups, responses to each] float32."""
        return torch.from_numpy(np.stack([group.advantages for group in self.groups]))

    @property
    def behavior_logprobs(self) -> list[np.ndarray | None]:
        """[N] of every rollout's response tokens; None where they were not computed."""
        return [row for group in self.groups for row in group.behavior_logprobs]

    def lag(self, step: int) -> list[int]:
        """[N] steps between each rollout's generation and step `step`."""
        return [step - group.generated for group in self.groups for _ in group.rollouts]

    @property
    def packs(self) -> list[TokenBatch]:
        """This data-parallel rank's micro-batches of all minibatches, in order."""
        return [pack for minibatch in self.minibatches for pack in minibatch.micro_batches]

    def freeze_behavior_logprobs(self, actor: MegatronActor | ReferencePolicy) -> None:
        """Compute behavior log-probs by what generated, as the actor still is; collective.

        On the very packs that training will use, if it trains these groups together: the first
        minibatch then sees a ratio of exactly 1. The pass also measures the entropy.
        """
        self.is_exact = True
        scored = actor.compute_logprobs_and_entropies(self.packs)
        for pack, (logprobs, _) in zip(self.packs, scored, strict=True):
            pack.behavior_logprobs = logprobs
        rows = gather_by_rollout(
            self.packs,
            [logprobs for logprobs, _ in scored],
            count=len(self.computed),
            topology=self.topology,
        )
        entropy = self._mean([entropies for _, entropies in scored])
        each = iter(rows)
        self.groups = [
            replace(
                group, behavior_logprobs=tuple(next(each) for _ in group.rollouts), entropy=entropy
            )
            for group in self.groups
        ]

    def freeze_engine_logprobs(self) -> None:
        """Take the engine's own log-probs as those of the behavior policy."""
        for pack in self.packs:
            pack.behavior_logprobs = pack.rollout_logprobs
        self.groups = [
            replace(
                group,
                behavior_logprobs=tuple(
                    np.asarray(rollout.response.rollout_logprobs, np.float32)
                    for rollout in group.rollouts
                ),
            )
            for group in self.groups
        ]

    def center_on(self, actor: MegatronActor) -> None:
        """Take ratios to the policy before this step's first update (decoupled objectives).

        The objective's correction leads from the engine's log-probs, which the groups keep, to it.
        """
        self.is_exact = True
        for pack, logprobs in zip(self.packs, actor.compute_logprobs(self.packs), strict=True):
            pack.behavior_logprobs = logprobs

    def report_by_lag(self, step: int) -> None:
        """Have the updates report tokens apart by how many versions they are behind `step`.

        Nothing where none is behind, as without lag, or where another run generated them.
        """
        responses = [rollout.response for rollout in self.rollouts]
        versions = {version for one in responses for _, version in one.versions}
        if min(versions) < 0:
            return
        self.lags = tuple(sorted(step - 1 - version for version in versions))
        if self.lags == (0,):
            return
        rows = [
            np.searchsorted(self.lags, step - 1 - token_versions(one)).astype(np.float32)
            for one in responses
        ]
        for pack, values in zip(self.packs, scatter_to_packs(self.packs, rows), strict=True):
            pack.classes = values.long()
        for minibatch in self.minibatches:
            minibatch.classes = len(self.lags)

    def freeze_reference_logprobs(self, reference: ReferencePolicy) -> None:
        """Log-probs of the same tokens under the reference policy, for a KL term."""
        for pack, logprobs in zip(self.packs, reference.compute_logprobs(self.packs), strict=True):
            pack.reference_logprobs = logprobs

    def _mean(self, values: list[Tensor]) -> float:
        """Mean over the response tokens of all packs, nan where there are none; collective."""
        total = torch.stack([value.double().sum() for value in values]).sum()
        count = sum(int(pack.response_mask.sum()) for pack in self.packs)
        sums = reduce_sum(
            torch.stack((total, torch.full_like(total, count))), group=self.topology.dp_group
        )
        return float(sums[0] / sums[1])

    def traces(self) -> dict[int, np.ndarray]:
        """Log-probs of the traced rollouts at each of their updates so far; collective."""
        return gather_traces(self.packs, self.traced, topology=self.topology)

    def metrics(self) -> dict[str, float]:
        """Rewards, lengths and generation speed."""
        rewards = [rollout.verdict.reward for rollout in self.rollouts]
        reasons = [rollout.verdict.reason for rollout in self.rollouts]
        lengths = [len(rollout.response.token_ids) for rollout in self.rollouts]
        truncated = [rollout.response.finish_reason == "length" for rollout in self.rollouts]
        by_source: dict[str, list[float]] = {}
        for rollout, reward in zip(self.rollouts, rewards, strict=True):
            by_source.setdefault(rollout.prompt.data_source, []).append(reward)
        logprobs = np.concatenate([r.response.rollout_logprobs for r in self.rollouts])
        return {
            **{f"reward_by_source/{s}": statistics.fmean(by_source[s]) for s in sorted(by_source)},
            "policy/entropy": _mean_if_known([group.entropy for group in self.groups]),
            "rollout/entropy": -float(logprobs.mean(dtype=np.float64)),
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "reward/time_limit_fraction": reasons.count(TIME_LIMIT) / len(reasons),
            "reward/failed_fraction": reasons.count(FAILED) / len(reasons),
            "reward/retries": sum(rollout.verdict.retries for rollout in self.rollouts),
            "reward/unparsable_truth_fraction": reasons.count(UNPARSABLE_TRUTH) / len(reasons),
            "advantage/zero_fraction": (self.advantages == 0).float().mean().item(),
            "advantage/zero_groups_fraction": (self.advantages == 0)
            .all(dim=1)
            .float()
            .mean()
            .item(),
            "train/computed_fraction": statistics.fmean(self.computed),
            "train/masked_fraction": statistics.fmean(self.masked),
            "reward/shaped_mean": statistics.fmean(self.shaped),
            "response/length_mean": statistics.fmean(lengths),
            "response/length_max": max(lengths),
            "response/truncated_fraction": statistics.fmean(truncated),
            "rollout/weight_version": min(r.response.weight_version for r in self.rollouts),
        }


def _mean_if_known(values: list[float]) -> float:
    """Of the values that are not nan; where all are the same, that very one."""
    known = [value for value in values if not math.isnan(value)]
    if len(set(known)) <= 1:
        return known[0] if known else math.nan
    return statistics.fmean(known)


def generation_metrics(
    fresh: Sequence[RolloutBatch],
    costs: dict[str, float],
    *,
    seconds: float,
    tokens: int | None = None,
) -> dict[str, float]:
    """How much was generated in a step, and how fast; nothing where no group was.

    costs: of dynamic sampling, what it dropped among them. tokens: where it is not that of groups.
    """
    if not any(batch.engine_seconds for batch in fresh):
        return {}
    if tokens is None:
        tokens = sum(len(r.response.token_ids) for batch in fresh for r in batch.rollouts)
        tokens += int(costs.get("dynamic/tokens_dropped", 0))
    engines = [sum(each) for each in zip(*(batch.engine_seconds for batch in fresh), strict=True)]
    mean = statistics.fmean(engines)
    return costs | {
        # The slowest engine's seconds over the mean; 1 where all are alike.
        "rollout/engine_imbalance": max(engines) / mean if mean else 1.0,
        "rollout/tokens": tokens,
        "rollout/tokens_per_second": tokens / seconds,
    }


def build_groups(
    rollouts: Sequence[Rollout], slots: Sequence[Slot], *, config: Config, step: int, updates: int
) -> list[Group]:
    """Groups of freshly judged rollouts with their advantages; log-probs are frozen next.

    `rollouts` come group after group, `rollout.responses_per_prompt` each, in the order of `slots`.
    step, updates: those before which they were generated.
    """
    size = config.rollout.responses_per_prompt
    rewards = torch.tensor([shape_reward(rollout, config) for rollout in rollouts])
    advantages = compute_advantages(rewards.view(-1, size), config.advantage).float().numpy()
    return [
        Group(
            slot=slot,
            rollouts=tuple(rollouts[place * size : (place + 1) * size]),
            advantages=advantages[place],
            behavior_logprobs=(None,) * size,
            entropy=math.nan,
            generated=step,
            updates=updates,
        )
        for place, slot in enumerate(slots)
    ]


def build_rollout_batch(
    groups: Sequence[Group],
    *,
    config: Config,
    objective: PolicyObjective,
    topology: Topology,
    engine_seconds: Sequence[float] = (),
) -> RolloutBatch:
    """Packs of groups, with the log-probs that were frozen with them.

    Rollouts whose advantage is 0 are packed only where the objective or `trainer.zero_advantage`
    asks for them: their gradient is 0, and the denominators count them all the same. Those that
    `shaping.truncated` masks are in neither. Fewer groups than a rollout batch has, which are about
    to be scored, may be cut into fewer minibatches.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    advantages = torch.from_numpy(np.concatenate([group.advantages for group in groups]))
    all_computed = config.trainer.zero_advantage == "compute" or objective.uses_zero_advantage
    counted = [not is_masked(rollout, config) for rollout in rollouts]
    computed = [
        one and (all_computed or advantage != 0)
        for one, advantage in zip(counted, advantages.tolist(), strict=True)
    ]
    minibatches = plan_minibatches(
        rollouts,
        advantages,
        minibatches=math.gcd(len(groups), config.trainer.minibatches),
        tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
        topology=topology,
        sequence_parallel=config.parallel.sequence and topology.tp_size > 1,
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
    )
    mark_traced(batch.packs, traced)
    frozen = batch.behavior_logprobs
    if all(row is not None for row, used in zip(frozen, computed, strict=True) if used):
        for pack, values in zip(batch.packs, scatter_to_packs(batch.packs, frozen), strict=True):
            pack.behavior_logprobs = values
    return batch


def compute_advantages(rewards: Tensor, settings: AdvantageSection) -> Tensor:
    """Advantages of [prompts, responses_per_prompt] rewards by the configured estimator."""
    match settings.estimator:
        case "group_relative":
            return group_relative_advantages(rewards, std=settings.std, shift=settings.shift)
        case "leave_one_out":
            return leave_one_out_advantages(rewards)
        case "batch_baseline":
            return batch_baseline_advantages(rewards, std=settings.std)
        case "optimal_value":
            return optimal_value_advantages(rewards, beta=settings.beta)
        case "raw":
            return raw_advantages(rewards, shift=settings.shift)

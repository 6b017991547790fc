"""What is generated once and reused: rollouts, their advantages, packs and behavior log-probs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

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
)
from megatron_rl.config import AdvantageSection, Config
from megatron_rl.data.packing import gather_by_rollout, plan_minibatches
from megatron_rl.distributed.collectives import reduce_sum
from megatron_rl.distributed.topology import Topology
from megatron_rl.objectives import PolicyObjective
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT, UNPARSABLE_TRUTH
from megatron_rl.trainer.traces import choose_traced, gather_traces, mark_traced
from megatron_rl.types import Minibatch, Rollout, TokenBatch


@dataclass
class RolloutBatch:
    """One rollout batch, frozen while it is reused; the same rollouts on every rank."""

    rollouts: list[Rollout]  # N, group after group
    advantages: Tensor  # [prompts, responses to each] float32
    computed: list[bool]  # [N] those that are in packs
    minibatches: list[Minibatch]  # this data-parallel rank's packs
    topology: Topology
    rollout_seconds: float
    engine_seconds: Sequence[float]  # of each engine
    traced: Sequence[int] = ()  # places of the rollouts whose log-probs every update keeps
    entropy: float = math.nan  # of the policy that generated, mean over the packs' response tokens

    @property
    def packs(self) -> list[TokenBatch]:
        """This data-parallel rank's micro-batches of all minibatches, in order."""
        return [pack for minibatch in self.minibatches for pack in minibatch.micro_batches]

    def freeze_behavior_logprobs(self, actor: MegatronActor) -> None:
        """Recompute behavior log-probs by the actor, on the very packs that training will use.

        The first minibatch then sees a ratio of exactly 1. The pass also measures the entropy.
        """
        scored = actor.compute_logprobs_and_entropies(self.packs)
        for pack, (logprobs, _) in zip(self.packs, scored, strict=True):
            pack.behavior_logprobs = logprobs
        self.entropy = self._mean([entropies for _, entropies in scored])

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

    def behavior_logprobs_by_rollout(self) -> list[np.ndarray | None]:
        """Behavior log-probs of every rollout's response tokens, gathered from all dp ranks.

        None where they were not computed.
        """
        values = [p.behavior_logprobs for p in self.packs if p.behavior_logprobs is not None]
        assert len(values) == len(self.packs), "behavior log-probs are not frozen yet"
        return gather_by_rollout(
            self.packs, values, count=len(self.rollouts), topology=self.topology
        )

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
            "policy/entropy": self.entropy,
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
            "response/length_mean": statistics.fmean(lengths),
            "response/length_max": max(lengths),
            "response/truncated_fraction": statistics.fmean(truncated),
            "rollout/engine_imbalance": _imbalance(self.engine_seconds),
            "rollout/tokens": sum(lengths),
            "rollout/tokens_per_second": sum(lengths) / self.rollout_seconds,
            "rollout/weight_version": min(r.response.weight_version for r in self.rollouts),
        }


def _imbalance(seconds: Sequence[float]) -> float:
    """The slowest engine's seconds over the mean; 1 where all are alike."""
    mean = statistics.fmean(seconds)
    return max(seconds) / mean if mean else 1.0


def build_rollout_batch(
    rollouts: list[Rollout],
    *,
    config: Config,
    objective: PolicyObjective,
    topology: Topology,
    rollout_seconds: float,
    engine_seconds: Sequence[float],
) -> RolloutBatch:
    """Advantages and packs of freshly judged rollouts.

    `rollouts` come group after group, `rollout.responses_per_prompt` each. Those whose advantage is
    0 are packed only where the objective or `trainer.zero_advantage` asks for them: their gradient
    is 0, and the denominators count them all the same.
    """
    rewards = torch.tensor([rollout.verdict.reward for rollout in rollouts])
    groups = rewards.view(-1, config.rollout.responses_per_prompt)
    advantages = compute_advantages(groups, config.advantage)
    all_computed = config.trainer.zero_advantage == "compute" or objective.uses_zero_advantage
    computed = [all_computed or advantage != 0 for advantage in advantages.flatten().tolist()]
    minibatches = plan_minibatches(
        rollouts,
        advantages.flatten(),
        minibatches=config.trainer.minibatches,
        tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
        topology=topology,
        sequence_parallel=config.parallel.sequence and topology.tp_size > 1,
        gemm_tokens=GEMM_TOKENS[config.model.fp8],
        computed=computed,
    )
    traced = choose_traced(
        rollouts, computed, count=config.logging.traced_responses, seed=config.seed
    )
    batch = RolloutBatch(
        rollouts, advantages, computed, minibatches, topology, rollout_seconds, engine_seconds,
        traced,
    )  # fmt: skip
    mark_traced(batch.packs, traced)
    return batch


def compute_advantages(rewards: Tensor, settings: AdvantageSection) -> Tensor:
    """Advantages of [prompts, responses_per_prompt] rewards by the configured estimator."""
    match settings.estimator:
        case "group_relative":
            return group_relative_advantages(rewards, std=settings.std)
        case "leave_one_out":
            return leave_one_out_advantages(rewards)
        case "batch_baseline":
            return batch_baseline_advantages(rewards, std=settings.std)
        case "optimal_value":
            return optimal_value_advantages(rewards, beta=settings.beta)

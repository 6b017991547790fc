"""Metrics of a rollout batch and of its generation."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl.data.packing import sequence_lengths
from megatron_rl.data.token_rows import is_local
from megatron_rl.engine.conversations import FAILURE_REASONS
from megatron_rl.rewards.verifier import FAILED, TIME_LIMIT, UNPARSABLE_TRUTH
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.types import Rollout


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Rewards, lengths and truncation of the rollouts that a step trains."""
    rewards = [rollout.grade_result.reward for rollout in batch.rollouts]
    reasons = [rollout.grade_result.reason for rollout in batch.rollouts]
    lengths = [rollout.response.length for rollout in batch.rollouts]
    truncated = [rollout.response.finish_reason == "length" for rollout in batch.rollouts]
    by_source: dict[str, list[float]] = {}
    for rollout, reward in zip(batch.rollouts, rewards, strict=True):
        by_source.setdefault(rollout.prompt.data_source, []).append(reward)
    return {
        **{f"reward_by_source/{s}": statistics.fmean(by_source[s]) for s in sorted(by_source)},
        "policy/entropy": _mean_if_known([group.entropy for group in batch.groups]),
        "rollout/entropy": _engine_entropy(batch.rollouts),
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        **_named_reward_means(batch.rollouts),
        "reward/time_limit_fraction": reasons.count(TIME_LIMIT) / len(reasons),
        "reward/failed_fraction": reasons.count(FAILED) / len(reasons),
        "reward/retries": sum(rollout.grade_result.retries for rollout in batch.rollouts),
        "reward/unparsable_truth_fraction": reasons.count(UNPARSABLE_TRUTH) / len(reasons),
        "advantage/zero_fraction": (~batch.learns).float().mean().item(),
        "advantage/zero_groups_fraction": (~batch.learns).all(dim=1).float().mean().item(),
        "train/computed_fraction": statistics.fmean(batch.computed),
        "train/masked_fraction": statistics.fmean(batch.masked),
        "train/shared_rows_fraction": batch.shared_rows,
        "reward/shaped_mean": statistics.fmean(batch.shaped),
        "response/length_mean": statistics.fmean(lengths),
        "response/length_max": max(lengths),
        "response/truncated_fraction": statistics.fmean(truncated),
        **sampling_metrics(batch.rollouts),
        "rollout/weight_version": min(r.response.weight_version for r in batch.rollouts),
        **_conversation_metrics(batch.rollouts),
    }


def _engine_entropy(rollouts: Sequence[Rollout]) -> float:
    """Negative mean of the engine's log-probs; nan where the rank lacks some: rank 0 has all."""
    rows = [rollout.response.rollout_logprobs for rollout in rollouts]
    return (
        -float(np.concatenate(rows).mean(dtype=np.float64))
        if all(map(is_local, rows))
        else math.nan
    )


def sampling_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Sizes of the sampling masks; nan where the rank lacks some: rank 0 has all. Empty without."""
    rows = [row for one in rollouts if len(row := one.response.mask_counts)]
    if not rows:
        return {}
    counts = np.concatenate(rows) if all(map(is_local, rows)) else np.array([math.nan])
    return {
        "sampling/kept_mean": float(counts.mean()),
        "sampling/kept_max": float(counts.max()),
        "sampling/one_kept_fraction": float(np.where(np.isnan(counts), counts, counts == 1).mean()),
    }


def _conversation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Turns, observations and failures of conversations, and rewards by the number of turns."""
    if not any(rollout.response.messages for rollout in rollouts):
        return {}
    responses = [rollout.response for rollout in rollouts]
    reasons = [rollout.grade_result.reason for rollout in rollouts]
    tokens = sum(len(one.token_ids) for one in responses)
    by_turns: dict[int, list[float]] = {}
    of_turn: dict[int, list[float]] = {}
    for rollout in rollouts:
        by_turns.setdefault(rollout.response.turns, []).append(rollout.grade_result.reward)
        for turn, reward in enumerate(rollout.grade_result.turn_rewards, start=1):
            of_turn.setdefault(turn, []).append(reward)
    return {
        "conversation/turns_mean": statistics.fmean(one.turns for one in responses),
        "conversation/turns_max": max(one.turns for one in responses),
        "conversation/rewrites_mean": statistics.fmean(len(one.restarts) for one in responses),
        "conversation/rewrites_max": max(len(one.restarts) for one in responses),
        "conversation/observed_fraction": 1 - sum(one.length for one in responses) / tokens,
        "conversation/context_max": max(
            length + 1 for one in rollouts for length in sequence_lengths(one)
        ),
        **{
            f"conversation/{kind}_fraction": reasons.count(reason) / len(reasons)
            for kind, reason in FAILURE_REASONS.items()
        },
        **{
            f"reward_by_turns/{turns}": statistics.fmean(rewards)
            for turns, rewards in sorted(by_turns.items())
        },
        **{
            f"reward_of_turn/{turn}": statistics.fmean(rewards)
            for turn, rewards in sorted(of_turn.items())
        },
    }


def environment_metrics(costs: Mapping[str, float]) -> dict[str, float]:
    """Answers of environments and the engine's prefix cache, from `engine.environment_costs`."""
    if not costs.get("answers"):
        return {}
    metrics = {
        "environment/answers": costs["answers"],
        "environment/seconds_mean": costs.get("seconds", 0.0) / costs["answers"],
    }
    if costs.get("context_tokens"):
        cached = costs.get("cached_tokens", 0) / costs["context_tokens"]
        metrics["environment/cached_fraction"] = cached
    return metrics


def _named_reward_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of each named reward; an ungraded response counts as 0, as in reward/mean."""
    names = sorted({name for rollout in rollouts for name in rollout.grade_result.rewards})
    return {
        f"reward/{name}_mean": statistics.fmean(
            r.grade_result.rewards.get(name, 0.0) for r in rollouts
        )
        for name in names
    }


def _mean_if_known(values: list[float]) -> float:
    """Mean of the values that are not nan; exact if all are equal."""
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
    """Generated tokens of a step and their speed; empty if no group was generated.

    costs: of dynamic sampling. tokens: if other than those of the groups.
    """
    if not any(batch.engine_seconds for batch in fresh):
        return {}
    if tokens is None:
        tokens = sum(r.response.length for batch in fresh for r in batch.rollouts)
        tokens += int(costs.get("dynamic/tokens_dropped", 0))
    engines = [sum(each) for each in zip(*(batch.engine_seconds for batch in fresh), strict=True)]
    mean = statistics.fmean(engines)
    changes = [batch.engine_routes_changed for batch in fresh]
    return (
        costs
        | routing_metrics([each for each in changes if each is not None], "engine_changed_fraction")
        | {
            # The slowest engine's seconds over the mean; 1 if all are equal.
            "rollout/engine_imbalance": max(engines) / mean if mean else 1.0,
            "rollout/tokens": tokens,
            "rollout/tokens_per_second": tokens / seconds,
        }
    )


def routing_metrics(counts: Sequence[Tensor], name: str) -> dict[str, float]:
    """Fraction of tokens whose set of experts changed, overall and by layer.

    counts: [layers, changed and all] each. Empty without any. Layers are counted from 0.
    """
    table = torch.stack(list(counts)).sum(dim=0) if counts else torch.zeros(1, 2)
    changed, tokens = table.sum(dim=0).tolist()
    if not tokens:
        return {}
    by_layer = {
        f"routing/{name}_by_layer/{layer}": row[0] / row[1]
        for layer, row in enumerate(table.tolist())
        if row[1]  # a layer with experts
    }
    return {f"routing/{name}": changed / tokens} | by_layer

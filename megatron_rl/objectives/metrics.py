"""From merged sums and maxima, on the host, to named numbers."""

import math

import torch
from torch import Tensor

from megatron_rl.objectives import schema

QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}


def raise_on_faults(places: Tensor) -> None:
    """Raise ValueError for the first unusable value found, naming its sequence and position."""
    for (name, problem), entry in zip(schema.FAULTS.items(), places.tolist(), strict=True):
        if entry > -math.inf:
            sequence, position = divmod(int(-entry), schema.PLACE)
            field = name.removesuffix("_positive")
            raise ValueError(
                f"{field} at sequence {sequence} of its pack, position {position} (valid "
                f"decisions counted from 1) {problem}"
            )


def compute_metrics(sums: Tensor, maxima: Tensor) -> dict[str, float]:
    """All metrics of one merged Statistics; empty buckets are left out."""
    scalars = dict(zip(schema.SUMS, sums.tolist(), strict=False))
    largest = dict(zip(schema.MAXIMA, maxima.tolist(), strict=True))
    tokens = max(scalars["tokens"], 1.0)
    mean = scalars["prefix_mean"] / tokens
    deviation = standard_deviation(mean, scalars["prefix_mean_squared"] / tokens)
    metrics = {
        "tokens": scalars["tokens"],
        "responses": scalars["responses"],
        "loss/policy": scalars["loss_policy"],
        "gate/acceptance": scalars["inside"] / tokens,
        "ratio/log_mean": scalars["log_ratio"] / tokens,
        "ratio/kl_to_behavior": scalars["kl_to_behavior"] / tokens,
        "ratio/prefix_mean_log_mean": mean,
        "ratio/prefix_mean_log_std": deviation,
        "ratio/max_deviation": max(largest["deviation"], 0.0),
    }
    if scalars["tokens"]:
        metrics["weight/log_max"] = largest["log_weight"]
        metrics["weight/log_min"] = -largest["minus_log_weight"]
    squares = scalars["weight_squared"]
    metrics["weight/effective_sample_fraction"] = (
        scalars["weight"] ** 2 / (tokens * squares) if squares else 0.0
    )
    metrics |= _rejections(scalars)
    metrics |= _optional_terms(scalars, largest)
    return metrics | _bucket_metrics(sums[len(schema.SUMS) :])


def _rejections(scalars: dict[str, float]) -> dict[str, float]:
    """Share of the tokens of each advantage sign that was rejected on each side."""
    return {
        f"gate/rejected_{side}_{sign}": scalars[f"{side}_{sign}"] / max(scalars[sign], 1.0)
        for side in ("above", "below")
        for sign in ("positive", "negative")
    }


def _optional_terms(scalars: dict[str, float], largest: dict[str, float]) -> dict[str, float]:
    metrics = {}
    if scalars["loss_kl"]:
        metrics["loss/kl"] = scalars["loss_kl"]
    if scalars["entropy_tokens"]:
        metrics["loss/entropy"] = scalars["loss_entropy"]
        metrics["entropy"] = scalars["entropy"] / scalars["entropy_tokens"]
    if scalars["rollout_tokens"]:
        count = scalars["rollout_tokens"]
        metrics["rollout_gap/mean"] = scalars["rollout_gap"] / count
        metrics["rollout_gap/absolute_mean"] = scalars["rollout_gap_absolute"] / count
        metrics["rollout_gap/rms"] = math.sqrt(scalars["rollout_gap_squared"] / count)
        metrics["rollout_gap/max"] = largest["rollout_gap"]
    return metrics


def _bucket_metrics(table: Tensor) -> dict[str, float]:
    size = schema.BUCKETS * len(schema.BUCKET_SUMS)
    rows = table[:size].view(schema.BUCKETS, -1).tolist()
    histograms = table[size:].view(schema.BUCKETS, schema.BINS)
    metrics = {}
    deciles = histograms[: schema.DECILES].sum(dim=0)
    if deciles.sum() > 0:
        for name, quantile in QUANTILES.items():
            metrics[f"weight/log_{name}"] = histogram_quantile(deciles, quantile)
    for bucket, row in enumerate(rows):
        values = dict(zip(schema.BUCKET_SUMS, row, strict=True))
        count = values["tokens"]
        if not count:
            continue
        if bucket < schema.DECILES:
            name = f"by_fraction/{(bucket + 1) / schema.DECILES:.1f}"
        else:
            name = f"by_position/2^{bucket - schema.DECILES:02d}"
        mean = values["log_weight"] / count
        deviation = standard_deviation(mean, values["log_weight_squared"] / count)
        metrics[f"{name}/acceptance"] = values["inside"] / count
        metrics[f"{name}/rejected_above"] = values["above"] / count
        metrics[f"{name}/rejected_below"] = values["below"] / count
        metrics[f"{name}/log_weight_std"] = deviation
        for quantile_name, quantile in QUANTILES.items():
            value = histogram_quantile(histograms[bucket], quantile)
            metrics[f"{name}/log_weight_{quantile_name}"] = value
    return metrics


def standard_deviation(mean: float, mean_square: float) -> float:
    """sqrt(E[x^2] - E[x]^2), 0 where that is only rounding."""
    variance = mean_square - mean * mean
    return math.sqrt(variance) if variance > 1e-12 * mean_square else 0.0


def histogram_quantile(counts: Tensor, quantile: float) -> float:
    """The geometric middle of the bin that holds the quantile of a log-weight histogram."""
    running = counts.cumsum(0)
    bin_index = int(torch.searchsorted(running, quantile * running[-1]))
    distance = min(bin_index, schema.BINS - 1) - schema.HALF
    if distance == 0:
        return 0.0
    decade = schema.SMALLEST_DECADE + (abs(distance) - 0.5) / schema.BINS_PER_DECADE
    return math.copysign(10**decade, distance)

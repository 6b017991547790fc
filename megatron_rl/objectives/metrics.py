"""From merged sums and maxima, on the host, to named numbers."""

import math
from dataclasses import dataclass

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
    size = len(schema.SUMS) + schema.BUCKETS * len(schema.BUCKET_SUMS)
    rows = sums[len(schema.SUMS) : size].view(schema.BUCKETS, -1)
    histograms = sums[size:].view(schema.BUCKETS, schema.BINS)
    # The buckets of t/L together are all tokens.
    everything = Bucket.of(rows[: schema.DECILES].sum(0), histograms[: schema.DECILES].sum(0))
    tokens = max(everything.tokens, 1.0)
    metrics = {
        "tokens": everything.tokens,
        "responses": scalars["responses"],
        "loss/policy": scalars["loss_policy"],
        "gate/acceptance": everything.count("inside") / tokens,
        "ratio/log_mean": scalars["log_ratio"] / tokens,
        "ratio/kl_to_behavior": scalars["kl_to_behavior"] / tokens,
        "ratio/max_deviation": max(
            _deviation(largest["log_ratio"]), _deviation(-largest["minus_log_ratio"])
        ),
        "weight/effective_sample_fraction": everything.effective_sample_fraction(),
        **{f"gate/{name}": value for name, value in everything.rejections().items()},
        **{f"ratio/prefix_mean_{name}": value for name, value in everything.log_w().items()},
    }
    if everything.tokens:
        metrics["weight/log_max"] = largest["log_weight"]
        metrics["weight/log_min"] = -largest["minus_log_weight"]
    if everything["rollout_tokens"]:
        absolute = scalars["rollout_gap_absolute"] / everything["rollout_tokens"]
        metrics["rollout_gap/absolute_mean"] = absolute
        metrics["rollout_gap/max"] = largest["rollout_gap"]
        metrics |= {f"rollout_gap/{name}": value for name, value in everything.gap().items()}
    metrics |= _optional_terms(scalars)
    for name, row, histogram in zip(_BUCKET_NAMES, rows, histograms, strict=True):
        bucket = Bucket.of(row, histogram)
        if bucket.tokens:
            metrics |= {f"{name}/{key}": value for key, value in bucket.metrics().items()}
    return metrics


_BUCKET_NAMES = (
    *(f"by_fraction/{(d + 1) / schema.DECILES:.1f}" for d in range(schema.DECILES)),
    *(f"by_position/2^{octave:02d}" for octave in range(schema.OCTAVES)),
)


def _deviation(log_ratio: float) -> float:
    """|rho - 1|, largest at the smallest or the largest log-ratio; 0 where there is none."""
    return abs(math.expm1(min(log_ratio, 700.0))) if math.isfinite(log_ratio) else 0.0


def _optional_terms(scalars: dict[str, float]) -> dict[str, float]:
    metrics = {}
    if scalars["loss_kl"]:
        metrics["loss/kl"] = scalars["loss_kl"]
    if scalars["entropy_tokens"]:
        metrics["loss/entropy"] = scalars["loss_entropy"]
        metrics["entropy"] = scalars["entropy"] / scalars["entropy_tokens"]
    return metrics


@dataclass(frozen=True)
class Bucket:
    """The sums and the histogram of log w_t of some tokens."""

    sums: dict[str, float]
    histogram: Tensor  # [BINS]

    @classmethod
    def of(cls, row: Tensor, histogram: Tensor) -> "Bucket":
        """From one row [BUCKET_SUMS] and histogram [BINS]."""
        return cls(dict(zip(schema.BUCKET_SUMS, row.tolist(), strict=True)), histogram)

    def __getitem__(self, name: str) -> float:
        return self.sums[name]

    def count(self, word: str) -> float:
        """Tokens of one side of the constraint or one sign of the advantage."""
        return sum(self.sums[name] for name in schema.COUNTS if word in name.split("_"))

    @property
    def tokens(self) -> float:
        """How many there are."""
        return sum(self.sums[name] for name in schema.COUNTS)

    def rejections(self) -> dict[str, float]:
        """Share of the tokens of each advantage sign that was rejected on each side."""
        return {
            f"rejected_{side}_{sign}": self[f"{side}_{sign}"] / max(self.count(sign), 1.0)
            for side in ("above", "below")
            for sign in ("positive", "negative")
        }

    def log_w(self) -> dict[str, float]:
        """Mean, spread and quantiles of log w_t = S_t / t."""
        count = max(self.tokens, 1.0)
        mean = self["log_w"] / count
        metrics = {
            "log_mean": mean,
            "log_std": standard_deviation(mean, self["log_w_squared"] / count),
        }
        if self.tokens:
            for name, quantile in QUANTILES.items():
                metrics[f"log_{name}"] = histogram_quantile(self.histogram, quantile)
        return metrics

    def effective_sample_fraction(self) -> float:
        """(sum w)^2 / (n sum w^2) of the objective's weights after the constraint."""
        squares = self["weight_squared"]
        return self["weight"] ** 2 / (self.tokens * squares) if squares else 0.0

    def gap(self) -> dict[str, float]:
        """Behavior minus rollout log-probability."""
        count = self["rollout_tokens"]
        return {
            "mean": self["rollout_gap"] / count,
            "rms": math.sqrt(self["rollout_gap_squared"] / count),
        }

    def metrics(self) -> dict[str, float]:
        """Everything that is reported of one bucket."""
        metrics = {
            "acceptance": self.count("inside") / self.tokens,
            **self.rejections(),
            **{f"prefix_mean_{name}": value for name, value in self.log_w().items()},
            "effective_sample_fraction": self.effective_sample_fraction(),
        }
        if self["rollout_tokens"]:
            metrics |= {f"rollout_gap_{name}": value for name, value in self.gap().items()}
        return metrics


def standard_deviation(mean: float, mean_square: float) -> float:
    """sqrt(E[x^2] - E[x]^2), 0 where that is only rounding."""
    variance = mean_square - mean * mean
    return math.sqrt(variance) if variance > 1e-12 * mean_square else 0.0


def histogram_quantile(counts: Tensor, quantile: float) -> float:
    """The geometric middle of the bin that holds the quantile of a histogram of log w_t."""
    running = counts.cumsum(0)
    bin_index = int(torch.searchsorted(running, quantile * running[-1]))
    distance = min(bin_index, schema.BINS - 1) - schema.HALF
    if distance == 0:
        return 0.0
    low, high = (_bin_edge(abs(distance) - 1 + end) for end in (0, 1))
    return math.copysign(math.sqrt(low * high), distance)


def _bin_edge(step: int) -> float:
    """Where the bin `step` places from the middle begins."""
    octave, quarter = divmod(step, schema.BINS_PER_OCTAVE)
    return 2.0 ** (schema.SMALLEST_EXPONENT + octave) * (1 + quarter / schema.BINS_PER_OCTAVE)

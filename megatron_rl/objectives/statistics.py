"""Statistics of an objective: sums and maxima that merge exactly over micro-batches and ranks.

Merged sums and maxima equal those of one big batch. Nothing waits for the device until
`raise_on_faults` or `to_metrics`, which copy once. `diagnostics.py` computes the statistics.

Bands of positions: ten of t/L (band d contains t/L in (d/10, (d+1)/10]) and one per power of two of
t (band b contains 2^b <= t < 2^(b+1)). Every band has a row of sums and a histogram of log w_t. A
histogram's bins are symmetric around 0 and follow the bits of a float32: its exponent and the
first two bits of its mantissa, so quantiles are exact up to a factor of 1.25.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, reduce_max, reduce_sum

# Of the whole batch; its other sums are those of the ten bands of t/L together.
SUMS = (
    "responses",
    "loss_policy",
    "loss_kl",
    "loss_entropy",
    "log_ratio",
    "kl_to_behavior",  # k3 of policy against behavior, from the behavior's samples
    "mismatch_absolute",
    "entropy_tokens",  # tokens that came with an entropy
    "entropy",
)
# Outcome of the constraint (above: rejected above the upper bound), by sign of the advantage.
SIDES, SIGNS = ("inside", "above", "below"), ("positive", "zero", "negative")
COUNTS = tuple(f"{side}_{sign}" for side in SIDES for sign in SIGNS)
BAND_SUMS = (
    *COUNTS,
    "log_w",  # S_t / t
    "log_w_squared",
    "weight",  # the objective's own, after the constraint, 0 where rejected or A = 0
    "weight_squared",
    "deviation_squared",  # (rho_t - 1)^2
    "mismatch",  # behavior minus rollout
    "mismatch_squared",
    "rollout_tokens",  # tokens that came with the engine's log-probability
)
MAXIMA = ("log_ratio", "minus_log_ratio", "log_weight", "minus_log_weight", "mismatch")
# Each fault's entry is -(sequence * SEQUENCE + position), so the first one wins.
FAULTS = {
    "policy_logprobs": "is not finite",
    "behavior_logprobs": "is not finite",
    "behavior_logprobs_positive": "is above 0, so it is no log-probability",
    "advantages": "is not finite",
    "rollout_logprobs": "is not finite",
    "reference_logprobs": "is not finite",
    "entropy": "is not finite",
    "objective.kl": "is not finite although all inputs are: the policy is too far from the "
    "reference, or from the behavior policy, for this estimator. k1 and k2 grow more slowly than "
    "k3; a higher objective.kl.coefficient or a lower optimizer.learning_rate keeps them closer",
    "objective.entropy_coefficient": "is not finite although all inputs are: lower it",
    "loss": "is not finite although all inputs are: its weight overflows, the log-ratios are too "
    "large for an objective without an upper bound",
}
SEQUENCE = 2**32

DECILES, OCTAVES = 10, 24
BANDS = (
    *(f"by_fraction/{(d + 1) / DECILES:.1f}" for d in range(DECILES)),
    *(f"by_position/2^{octave:02d}" for octave in range(OCTAVES)),
)
SMALLEST_EXPONENT, EXPONENTS = -20, 27  # |log w| from 2^-20 (1e-6) to 2^7 (128)
BINS_PER_OCTAVE = 4
MIDDLE = BINS_PER_OCTAVE * EXPONENTS  # the bin of 0
BINS = 2 * MIDDLE + 1
QUANTILES = {"q05": 0.05, "median": 0.5, "q95": 0.95}

SIZES = (len(SUMS), len(BANDS) * len(BAND_SUMS), len(BANDS) * BINS)


@dataclass
class Statistics:
    """Sums and maxima over the valid decisions of one or more micro-batches."""

    sums: Tensor  # [sum of SIZES] float64: SUMS, [BANDS, BAND_SUMS], [BANDS, BINS]
    maxima: Tensor  # [MAXIMA + FAULTS] float64
    classes: Tensor | None = None  # [C, tenths of t/L, BAND_SUMS] float64, if requested

    @classmethod
    def empty(cls, device: torch.device | str = "cpu", *, classes: int = 0) -> "Statistics":
        """Create the statistics of no tokens, the neutral element of merging."""
        table = None
        if classes:
            shape = (classes, DECILES, len(BAND_SUMS))
            table = torch.zeros(shape, dtype=torch.float64, device=device)
        sums = torch.zeros(sum(SIZES), dtype=torch.float64, device=device)
        return cls(sums, sums.new_full((len(MAXIMA) + len(FAULTS),), -torch.inf), table)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [one for one in (self.sums, self.maxima, self.classes) if one is not None]

    def merge(self, other: "Statistics") -> "Statistics":
        """Return the statistics of both batches together."""
        given = [one for one in (self.classes, other.classes) if one is not None]
        return Statistics(
            self.sums + other.sums,
            torch.maximum(self.maxima, other.maxima),
            sum(given[1:], given[0]) if given else None,
        )

    def all_reduce(self, group: Group) -> "Statistics":
        """Return the statistics of all ranks of the group together, on each rank."""
        return Statistics(
            reduce_sum(self.sums, group=group),
            reduce_max(self.maxima, group=group),
            None if self.classes is None else reduce_sum(self.classes, group=group),
        )

    def raise_on_faults(self) -> None:
        """Raise ValueError with sequence and position of an invalid input; copies once."""
        entries = self.maxima[len(MAXIMA) :].tolist()
        for (name, problem), entry in zip(FAULTS.items(), entries, strict=True):
            if entry > -math.inf:
                sequence, position = divmod(int(-entry), SEQUENCE)
                field = name.removesuffix("_positive")
                raise ValueError(
                    f"{field} at sequence {sequence} of its pack, position {position} (valid "
                    f"decisions counted from 1) {problem}"
                )

    def bands(self) -> tuple[Tensor, Tensor]:
        """Return the sums [BANDS, BAND_SUMS] and the histograms [BANDS, BINS]."""
        _, rows, histograms = self.sums.split(SIZES)
        return rows.view(len(BANDS), -1), histograms.view(len(BANDS), -1)

    def everything(self) -> "Band":
        """Return all tokens as one band; waits for the device."""
        return Band(*(table[:DECILES].sum(0).cpu() for table in self.bands()))

    def to_metrics(self) -> dict[str, float]:
        """Compute named numbers for logging, without empty bands; waits for the device.

        Raises ValueError with sequence and position of an invalid input.
        """
        copied = torch.cat((self.sums, self.maxima)).cpu()
        host = Statistics(*copied.split((sum(SIZES), len(MAXIMA) + len(FAULTS))))
        host.raise_on_faults()
        metrics = host._whole_batch()
        for name, row, histogram in zip(BANDS, *host.bands(), strict=True):
            band = Band(row, histogram)
            if band.tokens:
                metrics |= {f"{name}/{key}": value for key, value in band.metrics().items()}
        return metrics

    def _whole_batch(self) -> dict[str, float]:
        total = dict(zip(SUMS, self.sums.tolist(), strict=False))
        largest = dict(zip(MAXIMA, self.maxima.tolist(), strict=False))
        everything = self.everything()
        tokens = max(everything.tokens, 1.0)
        metrics = {
            "tokens": everything.tokens,
            "tokens_with_advantage": everything.movable,
            "responses": total["responses"],
            "loss/policy": total["loss_policy"],
            "gate/acceptance": everything.acceptance(),
            "ratio/log_mean": total["log_ratio"] / tokens,
            "ratio/kl_to_behavior": total["kl_to_behavior"] / tokens,
            "ratio/chi_square": everything["deviation_squared"] / tokens,
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
            absolute = total["mismatch_absolute"] / everything["rollout_tokens"]
            metrics["mismatch/logprob_abs_diff_mean"] = absolute
            metrics["mismatch/logprob_abs_diff_max"] = largest["mismatch"]
            metrics |= {
                f"mismatch/logprob_diff_{name}": value for name, value in everything.gap().items()
            }
        if total["loss_kl"]:
            metrics["loss/kl"] = total["loss_kl"]
        if total["entropy_tokens"]:
            metrics["loss/entropy"] = total["loss_entropy"]
            metrics["entropy"] = total["entropy"] / total["entropy_tokens"]
        return metrics


def _deviation(log_ratio: float) -> float:
    """Compute |rho - 1|; 0 for an infinite log-ratio, the maximum over no tokens."""
    return abs(math.expm1(min(log_ratio, 700.0))) if math.isfinite(log_ratio) else 0.0


class Band:
    """Sums [BAND_SUMS] and histogram [BINS] of log w_t of a band's tokens, on the host."""

    def __init__(self, row: Tensor, histogram: Tensor) -> None:
        self.sums = dict(zip(BAND_SUMS, row.tolist(), strict=True))
        self.histogram = histogram

    def __getitem__(self, name: str) -> float:
        return self.sums[name]

    def count(self, *signs: str) -> float:
        """Count the tokens whose advantage has one of the signs."""
        return sum(self[f"{side}_{sign}"] for side in SIDES for sign in signs)

    @property
    def tokens(self) -> float:
        """Number of tokens."""
        return self.count(*SIGNS)

    @property
    def movable(self) -> float:
        """Number of tokens that can move the policy: with non-zero advantage."""
        return self.count("positive", "negative")

    def acceptance(self) -> float:
        """Compute the fraction of movable tokens with unchanged weight; 1 if there are none."""
        inside = self["inside_positive"] + self["inside_negative"]
        return inside / self.movable if self.movable else 1.0

    def effective_sample_fraction(self) -> float:
        """Compute (sum w)^2 / (n sum w^2) of the n movable tokens' constrained weights."""
        squares = self["weight_squared"]
        if not self.movable:
            return 1.0
        return self["weight"] ** 2 / (self.movable * squares) if squares else 0.0

    def rejections(self) -> dict[str, float]:
        """Compute the fraction of tokens rejected on each side, by sign of the advantage."""
        return {
            f"rejected_{side}_{sign}": self[f"{side}_{sign}"] / max(self.count(sign), 1.0)
            for side in ("above", "below")
            for sign in ("positive", "negative")
        }

    def log_w(self) -> dict[str, float]:
        """Compute mean, standard deviation and quantiles of log w_t = S_t / t."""
        count = max(self.tokens, 1.0)
        mean, square = self["log_w"] / count, self["log_w_squared"] / count
        variance = square - mean * mean
        std = math.sqrt(variance) if variance > 1e-12 * square else 0.0  # else only rounding
        metrics = {"log_mean": mean, "log_std": std}
        if self.tokens:
            for name, quantile in QUANTILES.items():
                metrics[f"log_{name}"] = histogram_quantile(self.histogram, quantile)
        return metrics

    def gap(self) -> dict[str, float]:
        """Compute mean and root mean square of behavior minus rollout log-probability."""
        count = self["rollout_tokens"]
        return {
            "mean": self["mismatch"] / count,
            "rms": math.sqrt(self["mismatch_squared"] / count),
        }

    def metrics(self) -> dict[str, float]:
        """Compute all metrics of one band."""
        metrics = {f"prefix_mean_{name}": value for name, value in self.log_w().items()}
        if self.movable:
            metrics |= self.rejections()
            metrics["acceptance"] = self.acceptance()
            metrics["effective_sample_fraction"] = self.effective_sample_fraction()
        if self["rollout_tokens"]:
            metrics |= {f"logprob_diff_{name}": value for name, value in self.gap().items()}
        return metrics


def histogram_quantile(counts: Tensor, quantile: float) -> float:
    """Return the geometric middle of the bin that contains the quantile of log w_t."""
    running = counts.cumsum(0)
    bin_index = int(torch.searchsorted(running, quantile * running[-1]))
    distance = min(bin_index, BINS - 1) - MIDDLE
    if distance == 0:
        return 0.0
    low, high = (bin_edge(abs(distance) - 1 + end) for end in (0, 1))
    return math.copysign(math.sqrt(low * high), distance)


def bin_edge(step: int) -> float:
    """Return the lower edge of the bin `step` + 1 away from the middle."""
    octave, quarter = divmod(step, BINS_PER_OCTAVE)
    return 2.0 ** (SMALLEST_EXPONENT + octave) * (1 + quarter / BINS_PER_OCTAVE)


def class_rows(updates: Sequence[Statistics]) -> Tensor:
    """Stack the rows [updates, C, tenths of t/L, BAND_SUMS] on the host; copies once.

    Without token classes all tokens are one class, with the rows of the bands.
    """
    rows = [
        update.bands()[0][None, :DECILES] if update.classes is None else update.classes
        for update in updates
    ]
    return torch.stack(rows).cpu()


def class_sums(rows: Tensor) -> dict[str, Tensor]:
    """Compute the sums behind `class_metrics` from rows [..., BAND_SUMS]; [...] each."""
    x = dict(zip(BAND_SUMS, rows.unbind(dim=-1), strict=True))
    counts = rows[..., : len(COUNTS)].unflatten(-1, (len(SIDES), len(SIGNS)))
    with_advantage = counts[..., [0, 2]]  # the sign is not zero
    return {
        "tokens": counts.sum(dim=(-2, -1)),
        "tokens_with_advantage": with_advantage.sum(dim=(-2, -1)),
        "accepted": with_advantage[..., 0, :].sum(dim=-1),
        "weight_sum": x["weight"],
        "weight_squared_sum": x["weight_squared"],
        "prefix_mean_log_sum": x["log_w"],
        "prefix_mean_log_squared_sum": x["log_w_squared"],
        "deviation_squared_sum": x["deviation_squared"],
    }


def class_metrics(rows: Tensor) -> dict[str, Tensor]:
    """Compute metrics from rows [..., BAND_SUMS]; [...] each, nan for no tokens."""
    x = class_sums(rows)
    mean = x["prefix_mean_log_sum"] / x["tokens"]
    variance = x["prefix_mean_log_squared_sum"] / x["tokens"] - mean.square()
    nothing = torch.where(x["tokens_with_advantage"] > 0, 0.0, torch.nan)
    squares = x["tokens_with_advantage"] * x["weight_squared_sum"]
    return {
        "tokens": x["tokens"],
        "prefix_mean_log_std": variance.clamp(min=0).sqrt(),
        "chi_square": x["deviation_squared_sum"] / x["tokens"],
        "acceptance": x["accepted"] / x["tokens_with_advantage"],
        # 0 if all of them were rejected.
        "effective_sample_fraction": torch.where(
            squares > 0, x["weight_sum"].square() / squares, nothing
        ),
    }

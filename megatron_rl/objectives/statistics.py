"""Statistics of an objective: sums and maxima that merge exactly over micro-batches and ranks.

Merged sums and maxima equal those of one big batch. Nothing waits for the device until
`raise_on_faults` or `to_metrics`, which copy once. `compute_statistics` computes them for a
micro-batch with a fixed number of device operations; on CPU these run over blocks of tokens that
fit into its cache. Tokens are added to cells of pairs (band of t/L, band of log2 t); the statistics
of a band are the margins of that table. Shapes: t tokens on this rank, b in a block.

Bands of positions: ten of t/L (band d contains t/L in (d/10, (d+1)/10]) and one per power of two of
t (band b contains 2^b <= t < 2^(b+1)). Every band has a row of sums and a histogram of log w_t. A
histogram's bins are symmetric around 0 and follow the bits of a float32: its exponent and the
first two bits of its mantissa, so quantiles are exact up to a factor of 1.25.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed.collectives import Group, reduce_max, reduce_sum
from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives.constraints import ConstrainedWeights, TokenWeights
from megatron_rl.objectives.inputs import TokenClasses, TokenInputs

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
    "log_to_reference",  # policy minus reference
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
            "tokens_with_advantage": everything.num_with_advantage,
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
        if total["log_to_reference"]:
            metrics["ratio/log_to_reference_mean"] = total["log_to_reference"] / tokens
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
    def num_with_advantage(self) -> float:
        """Number of tokens that can move the policy: with non-zero advantage."""
        return self.count("positive", "negative")

    def acceptance(self) -> float:
        """Compute the fraction of tokens with advantage with an unchanged weight; 1 without any."""
        inside = self["inside_positive"] + self["inside_negative"]
        return inside / self.num_with_advantage if self.num_with_advantage else 1.0

    def effective_sample_fraction(self) -> float:
        """Compute (sum w)^2 / (n sum w^2) of the constrained weights of n tokens with advantage."""
        squares = self["weight_squared"]
        if not self.num_with_advantage:
            return 1.0
        return self["weight"] ** 2 / (self.num_with_advantage * squares) if squares else 0.0

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
        if self.num_with_advantage:
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


CPU_BLOCK = 2**14  # tokens: a column of float64 is 128 KiB
# Rounding of a float32 log-softmax can lift a probability of 1 slightly above 0.
BEHAVIOR_LIMIT = 1e-4
EXPONENT_BIAS, MANTISSA_BITS = 127, 23  # of a float32
SMALLEST_STEP = (EXPONENT_BIAS + SMALLEST_EXPONENT) * BINS_PER_OCTAVE
PAIRS = DECILES * OCTAVES


@dataclass(frozen=True)
class Terms:
    """The terms of an objective's loss; [t] each, None for disabled terms."""

    policy: Tensor
    kl: Tensor | None = None
    entropy: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The sum of the terms; [t]."""
        total = self.policy
        for term in (self.kl, self.entropy):
            if term is not None:
                total = total + term
        return total


@dataclass(frozen=True)
class Tokens:
    """The inputs of the statistics; [t] or [b] each."""

    mask: Tensor
    position: Tensor
    length: Tensor
    pair: Tensor  # of bands, PAIRS off the mask
    row: Tensor | None  # of a class and its tenth of t/L
    log_ratio: Tensor
    prefix_sum: Tensor
    log_weight: Tensor
    constrained: ConstrainedWeights
    loss: Tensor
    given: TokenInputs
    terms: Terms


def _block(x: Any, start: int, end: int) -> Any:
    """Slice tokens `start` to `end` of every tensor in nested dataclasses."""
    if x is None or isinstance(x, Tensor):
        return None if x is None else x[start:end]
    if isinstance(x, Mapping):
        return {name: _block(part, start, end) for name, part in x.items()}
    return type(x)(**{name: _block(part, start, end) for name, part in vars(x).items()})


@torch.no_grad()
def compute_statistics(
    given: TokenInputs, weighed: TokenWeights, terms: Terms, classes: TokenClasses | None
) -> Statistics:
    """Compute the statistics of a micro-batch's tokens on this rank."""
    layout = weighed.ratios.layout
    pair = layout.once(band_pairs)
    tokens = Tokens(
        mask=layout.mask,
        position=layout.position,
        length=layout.length,
        pair=pair,
        row=None if classes is None else _class_rows(classes, pair),
        log_ratio=weighed.ratios.token,
        prefix_sum=weighed.ratios.prefix_sum,
        log_weight=weighed.log_weight,
        constrained=weighed.constrained,
        loss=terms.loss,
        given=given,
        terms=terms,
    )
    bands = RowSums(PAIRS, layout.device)
    apart = RowSums(classes.count * DECILES if classes else 0, layout.device)
    histogram = torch.zeros(PAIRS + 1, BINS, dtype=torch.float64, device=layout.device)
    scalars, maxima, suspects = [], [], []
    size = CPU_BLOCK if layout.device.type == "cpu" else layout.local_tokens
    for start in range(0, layout.local_tokens, size):
        block = _block(tokens, start, start + size)
        outcome, columns = _outcome(block), _columns(block)
        bands.add(block.pair, outcome, columns)
        if block.row is not None:
            apart.add(block.row, outcome, columns)
        bins = block.pair * BINS + histogram_bin(columns["log_w"])
        histogram.view(-1).scatter_add_(0, bins, torch.ones_like(columns["log_w"]))
        scalars.append(_scalar_sums(block))
        maxima.append(_maxima(block))
        suspects.append(start + _suspects(block))
    suspect = torch.cat(suspects)
    address = layout.sequence_ids[suspect].long() * SEQUENCE + layout.position[suspect]
    faults = torch.where(_faults(tokens, suspect), -address.double(), -torch.inf).amax(dim=1)
    margins = _margins(bands.table()), _margins(histogram[:-1])
    return Statistics(
        torch.cat((torch.stack(scalars).sum(dim=0), *margins)),
        torch.cat((torch.stack(maxima).amax(dim=0), faults)),
        apart.table().view(classes.count, DECILES, -1) if classes else None,
    )


def band_pairs(layout: SequenceLayout) -> Tensor:
    """Compute the index of each token's pair of bands, PAIRS off the mask; [t] int64."""
    position, length = layout.position.clamp(min=1), layout.length.clamp(min=1)
    tenth = ((DECILES * position - 1) // length).clamp(max=DECILES - 1)
    octave = torch.frexp(position.float()).exponent - 1
    pair = tenth * OCTAVES + octave.clamp(max=OCTAVES - 1)
    return torch.where(layout.mask, pair, PAIRS).long()  # scatter_add_ needs int64


def _class_rows(classes: TokenClasses, pair: Tensor) -> Tensor:
    """Compute the row of each token's class and tenth, the last row off the mask; [t] int64."""
    row = classes.of * DECILES + pair // OCTAVES
    return torch.where(pair < PAIRS, row, classes.count * DECILES)


class RowSums:
    """BAND_SUMS per row of tokens, in float64; an additional row collects masked-out tokens."""

    def __init__(self, rows: int, device: torch.device) -> None:
        sizes = (rows + 1, len(COUNTS)), (len(BAND_SUMS) - len(COUNTS), rows + 1)
        self.counts, self.sums = (
            torch.zeros(size, dtype=torch.float64, device=device) for size in sizes
        )

    def add(self, row: Tensor, outcome: Tensor, columns: dict[str, Tensor]) -> None:
        """Add a block of tokens; [b] each."""
        cell = row * len(COUNTS) + outcome
        self.counts.view(-1).scatter_add_(0, cell, torch.ones_like(columns["log_w"]))
        for total, name in zip(self.sums, BAND_SUMS[len(COUNTS) :], strict=True):
            if name in columns:
                total.scatter_add_(0, row, columns[name])

    def table(self) -> Tensor:
        """Return the sums without the additional row; [rows, BAND_SUMS]."""
        return torch.cat((self.counts, self.sums.T), dim=1)[:-1]


def _margins(table: Tensor) -> Tensor:
    """Sum a table over pairs of bands [PAIRS, n] into each band; [BANDS * n]."""
    pairs = table.view(DECILES, OCTAVES, -1)
    return torch.cat((pairs.sum(dim=1), pairs.sum(dim=0))).reshape(-1)


def _columns(x: Tokens) -> dict[str, Tensor]:
    """Compute the known per-token values to be summed, except the outcome; [b] float64 each."""
    log_w = x.prefix_sum.double() / x.position.clamp(min=1)
    # Only tokens that can move the policy; the clamp keeps the square finite.
    weight = torch.where(x.given.advantages == 0, 0, x.constrained.coefficient)
    weight = weight.double().clamp(max=1e100)
    columns = {
        "log_w": log_w,
        "log_w_squared": log_w.square(),
        "weight": weight,
        "weight_squared": weight.square(),
        "deviation_squared": torch.expm1(x.log_ratio.double().clamp(max=300)).square(),
    }
    if (gap := x.given.log_gap) is not None:
        gap = gap.double()
        columns |= {
            "mismatch": gap,
            "mismatch_squared": gap.square(),
            "rollout_tokens": torch.ones_like(gap),
        }
    return columns


def _outcome(x: Tokens) -> Tensor:
    """Compute each token's index in COUNTS, by constraint outcome and sign of A; [b]."""
    advantages = x.given.advantages
    sign = (advantages <= 0).byte() + (advantages < 0)  # positive 0, zero 1, negative 2
    is_below = (x.log_weight <= 0).byte()
    side = (~x.constrained.inside).byte() * (1 + is_below)  # inside 0, above 1, below 2
    return len(SIGNS) * side + sign


def histogram_bin(log_w: Tensor) -> Tensor:
    """Compute the bin of each log-weight from its exponent and two bits of the mantissa; [b].

    Bins are symmetric around 0. Values below 2^SMALLEST_EXPONENT fall into the middle bin,
    non-finite values into the outermost bins.
    """
    bits = log_w.float().view(torch.int32)
    steps = ((bits & 0x7FFFFFFF) >> (MANTISSA_BITS - 2)) - (SMALLEST_STEP - 1)
    distance = steps.clamp(0, MIDDLE)
    return MIDDLE + torch.where(bits < 0, -distance, distance)


def _scalar_sums(x: Tokens) -> Tensor:
    """Compute one number for each of SUMS."""
    log_ratio, gap, entropy = x.log_ratio.double(), x.given.log_gap, x.given.entropy
    reference = x.given.reference_logprobs
    rows = {
        "responses": x.mask & (x.position == x.length),  # each has one last decision
        "loss_policy": x.terms.policy,
        "loss_kl": x.terms.kl,
        "loss_entropy": x.terms.entropy,
        "log_ratio": log_ratio,
        "kl_to_behavior": torch.expm1(log_ratio.clamp(max=700)) - log_ratio,
        "mismatch_absolute": None if gap is None else gap.abs(),
        "entropy_tokens": None if entropy is None else x.mask,
        "entropy": entropy,
        "log_to_reference": None if reference is None else x.given.policy_logprobs - reference,
    }
    zero = torch.zeros((), dtype=torch.float64, device=x.mask.device)
    return torch.stack(
        [zero if (row := rows[name]) is None else row.double().sum() for name in SUMS]
    )


def _maxima(x: Tokens) -> Tensor:
    """Compute one number for each of MAXIMA; log-ratio and gap are 0 off the mask."""
    smallest, largest = torch.aminmax(x.log_ratio)
    gap, log_weight = x.given.log_gap, x.log_weight
    numbers = {
        "log_ratio": largest,
        "minus_log_ratio": -smallest,
        "log_weight": torch.where(x.mask, log_weight, -torch.inf).amax(),
        "minus_log_weight": -torch.where(x.mask, log_weight, torch.inf).amin(),
        "mismatch": torch.zeros_like(largest) if gap is None else gap.abs().amax(),
    }
    return torch.stack([numbers[name].double() for name in MAXIMA])


def _suspects(x: Tokens) -> Tensor:
    """Find the first token with an invalid input and the first with an invalid loss; [2].

    Returns any token if there is none; `_faults` decides. Uses one pass over a sum instead of one
    per input: a sum is not finite if one of its terms is not.
    """
    given = [column for column in _inputs(x).values() if column is not None]
    bad = _not_finite(sum(given[1:], given[0])) | (x.given.behavior_logprobs > BEHAVIOR_LIMIT)
    return torch.stack((bad, _not_finite(x.loss))).byte().argmax(dim=1)


def _inputs(x: Tokens) -> dict[str, Tensor | None]:
    """Return the inputs whose faults are named; those of further values show in the loss."""
    return {name: value for name, value in vars(x.given).items() if name != "further"}


def _faults(x: Tokens, index: Tensor) -> Tensor:
    """Test the tokens `index` [n] for each of FAULTS; [FAULTS, n] bool."""
    columns = {
        **_inputs(x),
        "objective.kl": x.terms.kl,
        "objective.entropy_coefficient": x.terms.entropy,
        "loss": x.loss,
    }
    none = torch.zeros_like(index, dtype=torch.bool)
    faults = {k: none if v is None else _not_finite(v[index]) for k, v in columns.items()}
    faults["behavior_logprobs_positive"] = x.given.behavior_logprobs[index] > BEHAVIOR_LIMIT
    return torch.stack([faults[name] for name in FAULTS])


def _not_finite(x: Tensor) -> Tensor:
    """Compute ~isfinite(x) in two passes: x - x is 0, or nan for non-finite values; bool."""
    return (x - x) != 0

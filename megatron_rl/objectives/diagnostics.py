"""Compute a micro-batch's Statistics with a fixed number of device operations.

On CPU the operations run over blocks of tokens that fit into its cache. Tokens are added to cells
of pairs (band of t/L, band of log2 t); the statistics of a band are the margins of that table.
Shapes: t tokens on this rank, b in a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import statistics as names
from megatron_rl.objectives.constraints import ConstrainedWeights, TokenWeights
from megatron_rl.objectives.inputs import TokenClasses, TokenInputs
from megatron_rl.objectives.statistics import Statistics

CPU_BLOCK = 2**14  # tokens: a column of float64 is 128 KiB
# Rounding of a float32 log-softmax can lift a probability of 1 slightly above 0.
BEHAVIOR_LIMIT = 1e-4
EXPONENT_BIAS, MANTISSA_BITS = 127, 23  # of a float32
SMALLEST_STEP = (EXPONENT_BIAS + names.SMALLEST_EXPONENT) * names.BINS_PER_OCTAVE
PAIRS = names.DECILES * names.OCTAVES


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
    apart = RowSums(classes.count * names.DECILES if classes else 0, layout.device)
    histogram = torch.zeros(PAIRS + 1, names.BINS, dtype=torch.float64, device=layout.device)
    scalars, maxima, suspects = [], [], []
    size = CPU_BLOCK if layout.device.type == "cpu" else layout.local_tokens
    for start in range(0, layout.local_tokens, size):
        block = _block(tokens, start, start + size)
        outcome, columns = _outcome(block), _columns(block)
        bands.add(block.pair, outcome, columns)
        if block.row is not None:
            apart.add(block.row, outcome, columns)
        bins = block.pair * names.BINS + histogram_bin(columns["log_w"])
        histogram.view(-1).scatter_add_(0, bins, torch.ones_like(columns["log_w"]))
        scalars.append(_scalar_sums(block))
        maxima.append(_maxima(block))
        suspects.append(start + _suspects(block))
    suspect = torch.cat(suspects)
    address = layout.sequence_ids[suspect].long() * names.SEQUENCE + layout.position[suspect]
    faults = torch.where(_faults(tokens, suspect), -address.double(), -torch.inf).amax(dim=1)
    margins = _margins(bands.table()), _margins(histogram[:-1])
    return Statistics(
        torch.cat((torch.stack(scalars).sum(dim=0), *margins)),
        torch.cat((torch.stack(maxima).amax(dim=0), faults)),
        apart.table().view(classes.count, names.DECILES, -1) if classes else None,
    )


def band_pairs(layout: SequenceLayout) -> Tensor:
    """Compute the index of each token's pair of bands, PAIRS off the mask; [t] int64."""
    position, length = layout.position.clamp(min=1), layout.length.clamp(min=1)
    tenth = ((names.DECILES * position - 1) // length).clamp(max=names.DECILES - 1)
    octave = torch.frexp(position.float()).exponent - 1
    pair = tenth * names.OCTAVES + octave.clamp(max=names.OCTAVES - 1)
    return torch.where(layout.mask, pair, PAIRS).long()  # scatter_add_ needs int64


def _class_rows(classes: TokenClasses, pair: Tensor) -> Tensor:
    """Compute the row of each token's class and tenth, the last row off the mask; [t] int64."""
    row = classes.of * names.DECILES + pair // names.OCTAVES
    return torch.where(pair < PAIRS, row, classes.count * names.DECILES)


class RowSums:
    """BAND_SUMS per row of tokens, in float64; an additional row collects masked-out tokens."""

    def __init__(self, rows: int, device: torch.device) -> None:
        sizes = (rows + 1, len(names.COUNTS)), (len(names.BAND_SUMS) - len(names.COUNTS), rows + 1)
        self.counts, self.sums = (
            torch.zeros(size, dtype=torch.float64, device=device) for size in sizes
        )

    def add(self, row: Tensor, outcome: Tensor, columns: dict[str, Tensor]) -> None:
        """Add a block of tokens; [b] each."""
        cell = row * len(names.COUNTS) + outcome
        self.counts.view(-1).scatter_add_(0, cell, torch.ones_like(columns["log_w"]))
        for total, name in zip(self.sums, names.BAND_SUMS[len(names.COUNTS) :], strict=True):
            if name in columns:
                total.scatter_add_(0, row, columns[name])

    def table(self) -> Tensor:
        """Return the sums without the additional row; [rows, BAND_SUMS]."""
        return torch.cat((self.counts, self.sums.T), dim=1)[:-1]


def _margins(table: Tensor) -> Tensor:
    """Sum a table over pairs of bands [PAIRS, n] into each band; [BANDS * n]."""
    pairs = table.view(names.DECILES, names.OCTAVES, -1)
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
    return len(names.SIGNS) * side + sign


def histogram_bin(log_w: Tensor) -> Tensor:
    """Compute the bin of each log-weight from its exponent and two bits of the mantissa; [b].

    Bins are symmetric around 0. Values below 2^SMALLEST_EXPONENT fall into the middle bin,
    non-finite ones into the outermost bins.
    """
    bits = log_w.float().view(torch.int32)
    steps = ((bits & 0x7FFFFFFF) >> (MANTISSA_BITS - 2)) - (SMALLEST_STEP - 1)
    distance = steps.clamp(0, names.MIDDLE)
    return names.MIDDLE + torch.where(bits < 0, -distance, distance)


def _scalar_sums(x: Tokens) -> Tensor:
    """Compute one number for each of SUMS."""
    log_ratio, gap, entropy = x.log_ratio.double(), x.given.log_gap, x.given.entropy
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
    }
    zero = torch.zeros((), dtype=torch.float64, device=x.mask.device)
    return torch.stack(
        [zero if (row := rows[name]) is None else row.double().sum() for name in names.SUMS]
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
    return torch.stack([numbers[name].double() for name in names.MAXIMA])


def _suspects(x: Tokens) -> Tensor:
    """Find the first token with an invalid input and the first with an invalid loss; [2].

    Returns any token if there is none; `_faults` decides. Uses one pass over a sum instead of one
    per input: a sum is not finite if one of its terms is not.
    """
    given = [column for column in vars(x.given).values() if column is not None]
    bad = _not_finite(sum(given[1:], given[0])) | (x.given.behavior_logprobs > BEHAVIOR_LIMIT)
    return torch.stack((bad, _not_finite(x.loss))).byte().argmax(dim=1)


def _faults(x: Tokens, index: Tensor) -> Tensor:
    """Test the tokens `index` [n] for each of FAULTS; [FAULTS, n] bool."""
    columns = {
        **vars(x.given),
        "objective.kl": x.terms.kl,
        "objective.entropy_coefficient": x.terms.entropy,
        "loss": x.loss,
    }
    none = torch.zeros_like(index, dtype=torch.bool)
    faults = {k: none if v is None else _not_finite(v[index]) for k, v in columns.items()}
    faults["behavior_logprobs_positive"] = x.given.behavior_logprobs[index] > BEHAVIOR_LIMIT
    return torch.stack([faults[name] for name in names.FAULTS])


def _not_finite(x: Tensor) -> Tensor:
    """Compute ~isfinite(x) in two passes: x - x is 0, or nan for non-finite values; bool."""
    return (x - x) != 0

"""Compute a micro-batch's Statistics with a fixed number of device operations.

Shapes: t tokens on this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.distributed.sequence_layout import SequenceLayout
from megatron_rl.objectives import schema
from megatron_rl.objectives.constraints import Constrained
from megatron_rl.objectives.statistics import Statistics
from megatron_rl.objectives.weights import LogRatios


@dataclass(frozen=True)
class Losses:
    """The terms of the per-token loss; [t] each, None where the term is off."""

    policy: Tensor
    kl: Tensor | None = None
    entropy: Tensor | None = None

    def total(self) -> Tensor:
        """The sum of the terms; [t]."""
        total = self.policy
        for term in (self.kl, self.entropy):
            if term is not None:
                total = total + term
        return total


@dataclass(frozen=True)
class Observed:
    """The inputs as given, before values off the mask were dropped; [t] each."""

    policy_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None


@torch.no_grad()
def compute_statistics(
    *,
    observed: Observed,
    losses: Losses,
    ratios: LogRatios,
    log_weight: Tensor,
    constrained: Constrained,
) -> Statistics:
    """The statistics of one micro-batch's tokens on this rank."""
    layout = ratios.layout
    mask = layout.mask
    # A fault is reported below; here it must not become an index out of range.
    log_weight = torch.nan_to_num(torch.where(mask, log_weight.double(), 0))
    above = ~constrained.inside & (log_weight > 0) & mask
    below = ~constrained.inside & ~(log_weight > 0) & mask
    gap = None
    if observed.rollout_logprobs is not None:
        gap = observed.behavior_logprobs.double() - observed.rollout_logprobs.double()
        gap = torch.where(mask, gap, 0)
    scalars = _scalar_sums(observed, losses, ratios, constrained, above, below, gap)
    buckets = _bucket_sums(layout, log_weight, constrained.inside, above, below)
    deviation = torch.expm1(ratios.token.double().clamp(max=700)).abs()
    candidates = [deviation, log_weight, -log_weight, torch.zeros_like(log_weight)]
    if gap is not None:
        candidates[3] = gap.abs()
    maxima = torch.where(mask, torch.stack(candidates), -torch.inf).amax(dim=1)
    faults = _fault_places(observed, losses.total(), layout)
    return Statistics(torch.cat((scalars, buckets)), torch.cat((maxima, faults)))


def _scalar_sums(
    observed: Observed,
    losses: Losses,
    ratios: LogRatios,
    constrained: Constrained,
    above: Tensor,
    below: Tensor,
    gap: Tensor | None,
) -> Tensor:
    layout, advantages = ratios.layout, observed.advantages
    every = torch.ones_like(layout.mask)
    positive, negative = advantages > 0, advantages < 0
    log_ratio, prefix_mean = ratios.token.double(), ratios.prefix_mean.double()
    weight = constrained.score_weight.double().clamp(max=1e100)  # its square must be finite
    rows = {
        "tokens": every,
        "responses": 1 / layout.length.clamp(min=1).double(),
        "loss_policy": losses.policy,
        "loss_kl": losses.kl,
        "loss_entropy": losses.entropy,
        "inside": constrained.inside,
        "positive": positive,
        "negative": negative,
        "above_positive": above & positive,
        "above_negative": above & negative,
        "below_positive": below & positive,
        "below_negative": below & negative,
        "log_ratio": log_ratio,
        "kl_to_behavior": torch.expm1(log_ratio.clamp(max=700)) - log_ratio,
        "prefix_mean": prefix_mean,
        "prefix_mean_squared": prefix_mean.square(),
        "weight": weight,
        "weight_squared": weight.square(),
        "rollout_tokens": None if gap is None else every,
        "rollout_gap": gap,
        "rollout_gap_absolute": None if gap is None else gap.abs(),
        "rollout_gap_squared": None if gap is None else gap.square(),
        "entropy_tokens": None if observed.entropy is None else every,
        "entropy": observed.entropy,
    }
    # One row at a time: all of them at once would be [24, t] in float64.
    return torch.stack([_masked_sum(rows[name], layout.mask) for name in schema.SUMS])


def _masked_sum(x: Tensor | None, mask: Tensor) -> Tensor:
    if x is None:
        return torch.zeros((), dtype=torch.float64, device=mask.device)
    if x.dtype == torch.bool:
        return (x & mask).sum().double()
    return torch.where(mask, x, 0).sum(dtype=torch.float64)


def _bucket_sums(
    layout: SequenceLayout, log_weight: Tensor, inside: Tensor, above: Tensor, below: Tensor
) -> Tensor:
    """[BUCKETS, BUCKET_SUMS] and [BUCKETS, BINS], flat."""
    mask = layout.mask.double()
    position = layout.position.clamp(min=1)
    decile = (schema.DECILES * position - 1) // layout.length.clamp(min=1)
    decile = decile.clamp(max=schema.DECILES - 1)
    octave = torch.frexp(position.float()).exponent.long() - 1
    # Counted once per pair of buckets; the two kinds of bucket are its margins.
    pair = decile * schema.OCTAVES + octave.clamp(max=schema.OCTAVES - 1)
    pairs = (schema.DECILES, schema.OCTAVES)
    columns = (mask, inside * mask, above * mask, below * mask, log_weight, log_weight.square())
    table = mask.new_zeros(len(columns), pairs[0] * pairs[1])
    for row, column in zip(table, columns, strict=True):
        row.index_add_(0, pair, column)
    histogram = mask.new_zeros(pairs[0] * pairs[1] * schema.BINS)
    histogram.index_add_(0, pair * schema.BINS + histogram_bin(log_weight), mask)
    table = table.T.reshape(*pairs, -1)
    histogram = histogram.view(*pairs, -1)
    margins = [torch.cat((x.sum(dim=1), x.sum(dim=0))).reshape(-1) for x in (table, histogram)]
    return torch.cat(margins)


def histogram_bin(log_weight: Tensor) -> Tensor:
    """The bin of each log-weight: symmetric around 0, logarithmic in its size; int64."""
    size = torch.log10(log_weight.abs()) - schema.SMALLEST_DECADE
    distance = torch.floor(size * schema.BINS_PER_DECADE).clamp(-1, schema.HALF - 1) + 1
    return (schema.HALF + torch.sign(log_weight) * distance).long()


def _fault_places(observed: Observed, loss: Tensor, layout: SequenceLayout) -> Tensor:
    """Minus the place of the first unusable value of each kind, -inf where there is none."""
    behavior = observed.behavior_logprobs
    # Rounding of a float32 log-softmax can lift a probability of 1 slightly above 0.
    faults = {
        "policy_logprobs": ~torch.isfinite(observed.policy_logprobs),
        "behavior_logprobs": ~torch.isfinite(behavior),
        "behavior_logprobs_positive": behavior > 1e-4,
        "advantages": ~torch.isfinite(observed.advantages),
        "loss": ~torch.isfinite(loss),
    }
    for name in ("rollout_logprobs", "reference_logprobs"):
        given = getattr(observed, name)
        faults[name] = torch.zeros_like(layout.mask) if given is None else ~torch.isfinite(given)
    places = (layout.sequence_ids * schema.PLACE + layout.position).double()
    found = torch.stack([faults[name] for name in schema.FAULTS]) & layout.mask
    return torch.where(found, -places, -torch.inf).amax(dim=1)

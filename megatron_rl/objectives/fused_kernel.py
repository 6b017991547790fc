# ruff: noqa: N803 - compile-time constants are in capitals, as Triton writes them
"""The Triton kernel behind `fused.py`: one pass over the tokens, everything in registers.

Reads the log-probabilities and the sums that the layout scanned, writes each token's loss and the
factor of its gradient, and adds up the statistics of `schema.py`. Bounds and statistics are in
float64: log(1 + x) in float32 would lose the digits that log1p keeps.
"""

import math

import triton
import triton.language as tl

from megatron_rl.objectives import schema

SUMS = tl.constexpr(len(schema.SUMS))
BUCKET_SUMS = tl.constexpr(len(schema.BUCKET_SUMS))
MAXIMA = tl.constexpr(len(schema.MAXIMA) + len(schema.FAULTS))
DECILES = tl.constexpr(schema.DECILES)
OCTAVES = tl.constexpr(schema.OCTAVES)
BINS = tl.constexpr(schema.BINS)
HALF = tl.constexpr(schema.HALF)
BINS_PER_DECADE = tl.constexpr(schema.BINS_PER_DECADE)
SMALLEST_DECADE = tl.constexpr(schema.SMALLEST_DECADE)
PLACE = tl.constexpr(schema.PLACE)
INFINITY = tl.constexpr(float("inf"))
LN10 = tl.constexpr(math.log(10))


@triton.jit
def _reach(tolerance, position, length, SCALE: tl.constexpr, power: tl.constexpr):
    """tolerance * h(t, L), float64."""
    if SCALE == "sqrt(L/t)":
        return tolerance * tl.sqrt(length / position)
    if SCALE == "t^p":
        return tolerance * tl.exp(power * tl.log(position))
    return tolerance + 0 * position


@triton.jit
def _lower(
    low, position, length, SPACE: tl.constexpr, SCALE: tl.constexpr, power: tl.constexpr
):  # fmt: skip
    reach = _reach(low, position, length, SCALE, power)
    if SPACE == "log":
        return -reach
    inside = tl.where(reach < 1, 1 - reach, 1.0)
    return tl.where(reach < 1, tl.log(inside), -INFINITY)


@triton.jit
def _upper(
    high, position, length, SPACE: tl.constexpr, SCALE: tl.constexpr, power: tl.constexpr
):  # fmt: skip
    reach = _reach(high, position, length, SCALE, power)
    if SPACE == "log":
        return reach
    return tl.log(1 + reach)


@triton.jit
def _finite(x):
    return (x == x) & (tl.abs(x) < INFINITY)


@triton.jit
def _fault(found, place):
    return tl.max(tl.where(found, -place, -INFINITY), axis=0)


@triton.jit
def _bucket_sums(table, bucket, mask, count, inside, above, below, log_w):
    tl.atomic_add(table + bucket * BUCKET_SUMS, count, mask=mask)
    tl.atomic_add(table + bucket * BUCKET_SUMS + 1, inside, mask=mask)
    tl.atomic_add(table + bucket * BUCKET_SUMS + 2, above, mask=mask)
    tl.atomic_add(table + bucket * BUCKET_SUMS + 3, below, mask=mask)
    tl.atomic_add(table + bucket * BUCKET_SUMS + 4, log_w, mask=mask)
    tl.atomic_add(table + bucket * BUCKET_SUMS + 5, log_w * log_w, mask=mask)


@triton.jit
def _constrain(
    log_w, advantage, position, length,
    low: tl.constexpr, high: tl.constexpr, dual: tl.constexpr, power: tl.constexpr,
    KIND: tl.constexpr, SIDED: tl.constexpr, SPACE: tl.constexpr, SCALE: tl.constexpr,
    HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, HAS_DUAL: tl.constexpr,
):  # fmt: skip
    """`constraints.py`: what enters J, what multiplies the score, and whether it was inside."""
    lower = -INFINITY + 0 * position
    upper = INFINITY + 0 * position
    if HAS_LOW:
        lower = _lower(low, position, length, SPACE, SCALE, power)
    if HAS_HIGH:
        upper = _upper(high, position, length, SPACE, SCALE, power)
    positive = advantage > 0
    negative = advantage < 0
    if KIND == "ppo_clip":
        cap = INFINITY + 0 * position
        if HAS_DUAL:
            if SPACE == "log":
                cap = _upper(dual, position, length, "log", SCALE, power)
            else:
                cap = tl.log(dual + 0 * position)
        lower = tl.where(negative, lower, -INFINITY)
        upper = tl.where(positive, upper, tl.where(negative, cap, INFINITY))
    below = log_w < lower
    above = log_w > upper
    if KIND == "hard_gate" and SIDED == "advantage":
        below = below & negative
        above = above & positive
    inside = (below | above) == 0
    exponent = tl.minimum(tl.maximum(log_w, lower), upper)
    if KIND == "hard_gate":
        exponent = tl.where(inside, log_w, 0.0)
    exponent = tl.where((advantage == 0) & (exponent > 80), 80.0, exponent)
    weight = tl.exp(exponent)
    score_weight = weight
    if KIND == "hard_gate":
        weight = tl.where(inside, weight, 0.0)
        score_weight = weight
    if KIND == "ppo_clip":
        score_weight = tl.where(inside, weight, 0.0)
    return weight, score_weight, inside


@triton.jit
def _divide(statistic, position, length, WEIGHT_DIVISOR: tl.constexpr):
    """The log-weight from the sum behind it: over t, over L, or as it is."""
    if WEIGHT_DIVISOR == "t":
        return statistic / position
    if WEIGHT_DIVISOR == "L":
        return statistic / length
    return statistic


@triton.jit
def _rollout_gap(rollout_p, valid, behavior, HAS_ROLLOUT: tl.constexpr):
    """Behavior minus rollout log-probability, and where the latter is unusable."""
    gap = 0 * behavior
    bad = valid & (valid == 0)
    if HAS_ROLLOUT:
        rollout = tl.load(rollout_p, mask=valid, other=0).to(tl.float64)
        gap = tl.where(valid, behavior - rollout, 0.0)
        bad = valid & (_finite(rollout) == 0)
    return gap, bad


@triton.jit
def _store_sums(
    row, valid, loss, inside, above, below, advantage, log_ratio, prefix_mean, score_weight,
    length, gap, HAS_ROLLOUT: tl.constexpr,
):  # fmt: skip
    """One row of schema.SUMS; the terms that the kernel does not cover stay 0."""
    positive = advantage > 0
    negative = advantage < 0
    one = valid.to(tl.float64)
    k3 = tl.exp(tl.minimum(log_ratio, 700.0)) - 1 - log_ratio
    weight = tl.where(valid, tl.minimum(score_weight, 1e100), 0.0)
    tl.store(row + 0, tl.sum(one, axis=0))
    tl.store(row + 1, tl.sum(tl.where(valid, 1 / length, 0.0), axis=0))
    tl.store(row + 2, tl.sum(loss, axis=0))
    tl.store(row + 3, 0.0)
    tl.store(row + 4, 0.0)
    tl.store(row + 5, tl.sum((valid & inside).to(tl.float64), axis=0))
    tl.store(row + 6, tl.sum((valid & positive).to(tl.float64), axis=0))
    tl.store(row + 7, tl.sum((valid & negative).to(tl.float64), axis=0))
    tl.store(row + 8, tl.sum((above & positive).to(tl.float64), axis=0))
    tl.store(row + 9, tl.sum((above & negative).to(tl.float64), axis=0))
    tl.store(row + 10, tl.sum((below & positive).to(tl.float64), axis=0))
    tl.store(row + 11, tl.sum((below & negative).to(tl.float64), axis=0))
    tl.store(row + 12, tl.sum(log_ratio, axis=0))
    tl.store(row + 13, tl.sum(k3, axis=0))
    tl.store(row + 14, tl.sum(prefix_mean, axis=0))
    tl.store(row + 15, tl.sum(prefix_mean * prefix_mean, axis=0))
    tl.store(row + 16, tl.sum(weight, axis=0))
    tl.store(row + 17, tl.sum(weight * weight, axis=0))
    tl.store(row + 18, tl.sum(one, axis=0) if HAS_ROLLOUT else 0.0)
    tl.store(row + 19, tl.sum(gap, axis=0))
    tl.store(row + 20, tl.sum(tl.abs(gap), axis=0))
    tl.store(row + 21, tl.sum(gap * gap, axis=0))
    tl.store(row + 22, 0.0)
    tl.store(row + 23, 0.0)


@triton.jit
def _store_maxima(
    row, valid, place, policy, behavior, advantage, gap, rollout_bad, log_w, loss
):  # fmt: skip
    """One row of schema.MAXIMA and schema.FAULTS."""
    deviation = tl.abs(tl.exp(tl.minimum(policy - behavior, 700.0)) - 1)
    tl.store(row + 0, tl.max(tl.where(valid, deviation, -INFINITY), axis=0))
    tl.store(row + 1, tl.max(tl.where(valid, log_w, -INFINITY), axis=0))
    tl.store(row + 2, tl.max(tl.where(valid, -log_w, -INFINITY), axis=0))
    tl.store(row + 3, tl.max(tl.where(valid, tl.abs(gap), -INFINITY), axis=0))
    tl.store(row + 4, _fault(valid & (_finite(policy) == 0), place))
    tl.store(row + 5, _fault(valid & (_finite(behavior) == 0), place))
    tl.store(row + 6, _fault(valid & (behavior > 1e-4), place))
    tl.store(row + 7, _fault(valid & (_finite(advantage) == 0), place))
    tl.store(row + 8, _fault(rollout_bad, place))
    tl.store(row + 9, -INFINITY)
    tl.store(row + 10, _fault(valid & (_finite(loss) == 0), place))


@triton.jit
def _add_to_buckets(
    buckets, histogram, valid, position, length, inside, above, below, log_w
):  # fmt: skip
    """Tenths of t/L and powers of two of t: sums, and histograms of the log-weight."""
    decile = (DECILES * position - 1) // length
    octave = DECILES + 0 * position
    for exponent in tl.static_range(1, OCTAVES):
        octave += (position >= (1 << exponent)).to(tl.int64)
    size = tl.where(log_w == 0, 1e-300, tl.abs(log_w))
    steps = tl.floor((tl.log(size) / LN10 - SMALLEST_DECADE) * BINS_PER_DECADE)
    steps = tl.minimum(tl.maximum(steps, -1.0), HALF - 1.0) + 1
    bin_index = HALF + tl.where(log_w > 0, steps, -steps).to(tl.int64)
    one = valid.to(tl.float64)
    kept = (valid & inside).to(tl.float64)
    _bucket_sums(buckets, decile, valid, one, kept, above, below, log_w)
    _bucket_sums(buckets, octave, valid, one, kept, above, below, log_w)
    tl.atomic_add(histogram + decile * BINS + bin_index, one, mask=valid)
    tl.atomic_add(histogram + octave * BINS + bin_index, one, mask=valid)


@triton.jit
def token_kernel(
    policy_p, behavior_p, advantages_p, rollout_p, statistic_p, prefix_p,
    mask_p, position_p, length_p, sequence_p,
    loss_p, slope_p, sums_p, maxima_p, buckets_p, histogram_p,
    tokens, denominator, denominator_rest,
    low: tl.constexpr, high: tl.constexpr, dual: tl.constexpr, power: tl.constexpr,
    HAS_ROLLOUT: tl.constexpr, KIND: tl.constexpr, SIDED: tl.constexpr, SPACE: tl.constexpr,
    SCALE: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, HAS_DUAL: tl.constexpr,
    WEIGHT_DIVISOR: tl.constexpr, TOKEN_SCORE: tl.constexpr, RESPONSE_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK tokens; `statistic` is the log-weight times its divisor (1, t, L)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = tl.load(mask_p + at, mask=at < tokens, other=0) != 0
    policy = tl.load(policy_p + at, mask=valid, other=0).to(tl.float64)
    behavior = tl.load(behavior_p + at, mask=valid, other=0).to(tl.float64)
    advantage = tl.load(advantages_p + at, mask=valid, other=0).to(tl.float64)
    log_w = tl.load(statistic_p + at, mask=valid, other=0).to(tl.float64)
    t = tl.load(position_p + at, mask=valid, other=1)
    total = tl.load(length_p + at, mask=valid, other=1)
    position = t.to(tl.float64)
    length = total.to(tl.float64)
    prefix_mean = tl.load(prefix_p + at, mask=valid, other=0).to(tl.float64) / position
    log_w = _divide(log_w, position, length, WEIGHT_DIVISOR)

    weight, score_weight, inside = _constrain(
        log_w, advantage, position, length, low, high, dual, power,
        KIND, SIDED, SPACE, SCALE, HAS_LOW, HAS_HIGH, HAS_DUAL,
    )  # fmt: skip
    # Triton hands floats over in float32: the second part holds what the first rounds away.
    divisor = 0 * position + denominator + denominator_rest
    if RESPONSE_MEAN:
        divisor = divisor * length
    slope = tl.where(valid, score_weight * advantage / divisor, 0.0)
    if TOKEN_SCORE:
        loss = tl.where(slope == 0, 0.0, -slope * policy)
    else:
        loss = tl.where(valid, -weight * advantage / divisor, 0.0)
    stored = loss.to(loss_p.dtype.element_ty)
    tl.store(loss_p + at, stored, mask=at < tokens)
    tl.store(slope_p + at, slope.to(slope_p.dtype.element_ty), mask=at < tokens)

    log_w = tl.where(_finite(log_w), log_w, 0.0)  # a fault must not become an index
    above = valid & (inside == 0) & (log_w > 0)
    below = valid & (inside == 0) & (log_w <= 0)
    gap, rollout_bad = _rollout_gap(rollout_p + at, valid, behavior, HAS_ROLLOUT)
    place = tl.load(sequence_p + at, mask=valid, other=0).to(tl.float64) * PLACE + position
    _store_sums(
        sums_p + tl.program_id(0) * SUMS, valid, loss, inside, above, below, advantage,
        policy - behavior, prefix_mean, score_weight, length, gap, HAS_ROLLOUT,
    )  # fmt: skip
    _store_maxima(
        maxima_p + tl.program_id(0) * MAXIMA, valid, place, policy, behavior, advantage, gap,
        rollout_bad, log_w, stored.to(tl.float64),
    )  # fmt: skip
    _add_to_buckets(
        buckets_p, histogram_p, valid, t, total, inside,
        above.to(tl.float64), below.to(tl.float64), log_w,
    )  # fmt: skip

# ruff: noqa: N803 - compile-time constants are in capitals, as Triton writes them
"""The Triton kernel behind `fused.py`: one pass over the tokens, everything in registers.

Reads the log-probabilities and the sums that the layout scanned, writes each token's loss and the
factor of its gradient, and adds up the statistics of `schema.py`. Bounds and statistics are in
float64: log(1 + x) in float32 would lose the digits that log1p keeps.
"""

import triton
import triton.language as tl

from megatron_rl.objectives import schema
from megatron_rl.objectives.buckets import MANTISSA_BITS, SMALLEST_STEP

SUMS = tl.constexpr(len(schema.SUMS))
COUNTS = tl.constexpr(len(schema.COUNTS))
SIGNS = tl.constexpr(len(schema.SIGNS))
COLUMNS = tl.constexpr(len(schema.BUCKET_SUMS) - len(schema.COUNTS))
MAXIMA = tl.constexpr(len(schema.MAXIMA) + len(schema.FAULTS))
DECILES = tl.constexpr(schema.DECILES)
OCTAVES = tl.constexpr(schema.OCTAVES)
BUCKETS = tl.constexpr(schema.BUCKETS)
BINS = tl.constexpr(schema.BINS)
HALF = tl.constexpr(schema.HALF)
FIRST_STEP = tl.constexpr(SMALLEST_STEP - 1)
MANTISSA_SHIFT = tl.constexpr(MANTISSA_BITS - 2)
DECILE_CELLS = tl.constexpr(128)  # powers of two above 10 * 9 and 24 * 9
OCTAVE_CELLS = tl.constexpr(256)
PLACE = tl.constexpr(schema.PLACE)
INFINITY = tl.constexpr(float("inf"))


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
def _store_sums(row, valid, loss, log_ratio, position, length, gap):
    """One row of schema.SUMS; the terms that the kernel does not cover stay 0."""
    k3 = tl.exp(tl.minimum(log_ratio, 700.0)) - 1 - log_ratio
    tl.store(row + 0, tl.sum((valid & (position == length)).to(tl.float64), axis=0))
    tl.store(row + 1, tl.sum(loss, axis=0))
    tl.store(row + 2, 0.0)
    tl.store(row + 3, 0.0)
    tl.store(row + 4, tl.sum(log_ratio, axis=0))
    tl.store(row + 5, tl.sum(k3, axis=0))
    tl.store(row + 6, tl.sum(tl.abs(gap), axis=0))
    tl.store(row + 7, 0.0)
    tl.store(row + 8, 0.0)


@triton.jit
def _store_maxima(
    row, valid, place, policy, behavior, advantage, gap, rollout_bad, log_w, loss
):  # fmt: skip
    """One row of schema.MAXIMA and schema.FAULTS."""
    log_ratio = policy - behavior  # 0 where not valid, as gap is
    tl.store(row + 0, tl.max(log_ratio, axis=0))
    tl.store(row + 1, tl.max(-log_ratio, axis=0))
    tl.store(row + 2, tl.max(tl.where(valid, log_w, -INFINITY), axis=0))
    tl.store(row + 3, tl.max(tl.where(valid, -log_w, -INFINITY), axis=0))
    tl.store(row + 4, tl.max(tl.abs(gap), axis=0))
    tl.store(row + 5, _fault(valid & (_finite(policy) == 0), place))
    tl.store(row + 6, _fault(valid & (_finite(behavior) == 0), place))
    tl.store(row + 7, _fault(valid & (behavior > 1e-4), place))
    tl.store(row + 8, _fault(valid & (_finite(advantage) == 0), place))
    tl.store(row + 9, _fault(rollout_bad, place))
    tl.store(row + 10, -INFINITY)
    tl.store(row + 11, -INFINITY)
    tl.store(row + 12, _fault(valid & (_finite(loss) == 0), place))


@triton.jit
def _bin(log_w):
    """`buckets.histogram_bin`, from the bits of a float32."""
    bits = log_w.to(tl.float32).to(tl.int32, bitcast=True)
    steps = ((bits & 0x7FFFFFFF) >> MANTISSA_SHIFT) - FIRST_STEP
    distance = tl.minimum(tl.maximum(steps, 0), HALF)
    return tl.where(bits < 0, -distance, distance)


@triton.jit
def _add_counts(counts_p, bucket, outcome, valid, BUCKETS_HERE: tl.constexpr, CELLS: tl.constexpr):
    """One histogram of (bucket, outcome) in shared memory, then one atomic per cell in use."""
    trash = BUCKETS_HERE * COUNTS
    counts = tl.histogram(tl.where(valid, bucket * COUNTS + outcome, trash), CELLS)
    cell = tl.arange(0, CELLS)
    tl.atomic_add(counts_p + cell, counts.to(tl.float64), mask=(cell < trash) & (counts > 0))


@triton.jit
def _sum_where(hit, x):
    return tl.sum(tl.where(hit, x, 0.0), axis=0)


@triton.jit
def _add_to_buckets(
    counts_p, columns_p, histogram_p, valid, pair, outcome, log_w, weight, gap,
    HAS_ROLLOUT: tl.constexpr,
):  # fmt: skip
    """Sums and histograms by position; `pair` is that of `buckets.position_pairs`.

    A block of consecutive tokens meets few buckets, so everything is added up inside the program
    and leaves it with one atomic per sum and bucket met: some 60 per 512 tokens instead of 20 per
    token, all to the same few hundred addresses. Only the histogram has an atomic per token, over
    52,000 cells and none for a log-weight of 0: `launch` finds those as what is missing.
    """
    decile = (pair // OCTAVES).to(tl.int32)
    octave = (pair % OCTAVES).to(tl.int32)
    _add_counts(counts_p, decile, outcome, valid, DECILES, DECILE_CELLS)
    _add_counts(counts_p + DECILES * COUNTS, octave, outcome, valid, OCTAVES, OCTAVE_CELLS)
    distance = _bin(log_w)
    one = valid.to(tl.int32)
    cell = pair * BINS + HALF + distance
    tl.atomic_add(histogram_p + cell, one, mask=valid & (distance != 0))
    for bucket in range(BUCKETS):
        hit = valid & ((decile == bucket) | (octave + DECILES == bucket))
        if tl.max(hit.to(tl.int32), axis=0) > 0:
            row = columns_p + bucket * COLUMNS
            tl.atomic_add(row + 0, _sum_where(hit, log_w))
            tl.atomic_add(row + 1, _sum_where(hit, log_w * log_w))
            tl.atomic_add(row + 2, _sum_where(hit, weight))
            tl.atomic_add(row + 3, _sum_where(hit, weight * weight))
            if HAS_ROLLOUT:
                tl.atomic_add(row + 4, _sum_where(hit, gap))
                tl.atomic_add(row + 5, _sum_where(hit, gap * gap))


@triton.jit
def token_kernel(
    policy_p, behavior_p, advantages_p, rollout_p, statistic_p, prefix_p,
    mask_p, position_p, length_p, sequence_p, pair_p,
    loss_p, slope_p, sums_p, maxima_p, counts_p, columns_p, histogram_p,
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

    outcome = (advantage <= 0).to(tl.int32) + (advantage < 0).to(tl.int32)
    outcome += SIGNS * (inside == 0).to(tl.int32) * (1 + (log_w <= 0).to(tl.int32))
    gap, rollout_bad = _rollout_gap(rollout_p + at, valid, behavior, HAS_ROLLOUT)
    place = tl.load(sequence_p + at, mask=valid, other=0).to(tl.float64) * PLACE + position
    _store_sums(
        sums_p + tl.program_id(0) * SUMS, valid, loss, policy - behavior, t, total, gap
    )  # fmt: skip
    _store_maxima(
        maxima_p + tl.program_id(0) * MAXIMA, valid, place, policy, behavior, advantage, gap,
        rollout_bad, log_w, stored.to(tl.float64),
    )  # fmt: skip
    _add_to_buckets(
        counts_p, columns_p, histogram_p, valid, tl.load(pair_p + at, mask=valid, other=0),
        outcome, prefix_mean, tl.minimum(score_weight, 1e100), gap, HAS_ROLLOUT,
    )  # fmt: skip


@triton.jit
def probe_kernel(result_p):
    """Says that Triton can build and start a kernel here."""
    tl.store(result_p, 1)

"""Which sums and maxima a Statistics holds, and in which order.

Position buckets: ten of t/L (bucket d holds t/L in (d/10, (d+1)/10]) and one per power of two of t
(bucket b holds 2^b <= t < 2^(b+1)). Every bucket has a row of sums and a histogram of log w_t. A
histogram's bins are symmetric around 0 and follow the bits of a float32: its exponent and the
first two bits of its mantissa, so quantiles are exact up to a factor of 1.25.
"""

# Whole batch; everything else about it is the sum over the ten buckets of t/L.
SUMS = (
    "responses",
    "loss_policy",
    "loss_kl",
    "loss_entropy",
    "log_ratio",
    "kl_to_behavior",  # k3 of policy against behavior, from the behavior's samples
    "rollout_gap_absolute",
    "entropy_tokens",  # tokens that came with an entropy
    "entropy",
)
# What the constraint did (above: rejected above the upper bound), by the sign of the advantage.
SIDES, SIGNS = ("inside", "above", "below"), ("positive", "zero", "negative")
COUNTS = tuple(f"{side}_{sign}" for side in SIDES for sign in SIGNS)
BUCKET_SUMS = (
    *COUNTS,
    "log_w",  # S_t / t
    "log_w_squared",
    "weight",  # the objective's own, after the constraint, 0 where rejected
    "weight_squared",
    "rollout_gap",  # behavior minus rollout
    "rollout_gap_squared",
    "rollout_tokens",  # tokens that came with the engine's log-probability
)
MAXIMA = ("log_ratio", "minus_log_ratio", "log_weight", "minus_log_weight", "rollout_gap")
# Each fault's entry is minus its place (sequence * PLACE + position), so the first one wins.
FAULTS = {
    "policy_logprobs": "is not finite",
    "behavior_logprobs": "is not finite",
    "behavior_logprobs_positive": "is above 0, so it is no log-probability",
    "advantages": "is not finite",
    "rollout_logprobs": "is not finite",
    "reference_logprobs": "is not finite",
    "entropy": "is not finite",
    "loss": "is not finite although all inputs are: its weight overflows, the log-ratios are too "
    "large for an objective without an upper bound",
}
PLACE = 2**32

DECILES = 10
OCTAVES = 24
BUCKETS = DECILES + OCTAVES
PAIRS = DECILES * OCTAVES
SMALLEST_EXPONENT, EXPONENTS = -20, 27  # |log w| from 2^-20 (1e-6) to 2^7 (128)
BINS_PER_OCTAVE = 4
HALF = BINS_PER_OCTAVE * EXPONENTS
BINS = 2 * HALF + 1

SUMS_SIZE = len(SUMS) + BUCKETS * len(BUCKET_SUMS) + BUCKETS * BINS
MAXIMA_SIZE = len(MAXIMA) + len(FAULTS)

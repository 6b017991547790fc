"""Which sums and maxima a Statistics holds, and in which order.

Quantiles come from histograms of the log-weight with eight bins per decade, so they are exact up
to a bin (a factor of 1.33). Position buckets: ten of t/L (bucket d holds t/L in (d/10, (d+1)/10])
and one per power of two of t (bucket b holds 2^b <= t < 2^(b+1)).
"""

SUMS = (
    "tokens",
    "responses",
    "loss_policy",
    "loss_kl",
    "loss_entropy",
    "inside",
    "positive",  # tokens with A > 0
    "negative",  # tokens with A < 0
    "above_positive",  # rejected above the upper bound with A > 0
    "above_negative",
    "below_positive",
    "below_negative",
    "log_ratio",
    "kl_to_behavior",  # k3 of policy against behavior, from the behavior's samples
    "prefix_mean",
    "prefix_mean_squared",
    "weight",  # after the constraint, 0 where rejected
    "weight_squared",
    "rollout_tokens",  # tokens that came with the engine's log-probability
    "rollout_gap",  # behavior minus rollout
    "rollout_gap_absolute",
    "rollout_gap_squared",
    "entropy_tokens",
    "entropy",
)
BUCKET_SUMS = ("tokens", "inside", "above", "below", "log_weight", "log_weight_squared")
MAXIMA = ("deviation", "log_weight", "minus_log_weight", "rollout_gap")
# Each fault's entry is minus its place (sequence * PLACE + position), so the first one wins.
FAULTS = {
    "policy_logprobs": "is not finite",
    "behavior_logprobs": "is not finite",
    "behavior_logprobs_positive": "is above 0, so it is no log-probability",
    "advantages": "is not finite",
    "rollout_logprobs": "is not finite",
    "reference_logprobs": "is not finite",
    "loss": "is not finite although all inputs are: its weight overflows, the log-ratios are too "
    "large for an objective without an upper bound",
}
PLACE = 2**32

DECILES = 10
OCTAVES = 24
BUCKETS = DECILES + OCTAVES
BINS_PER_DECADE = 8
SMALLEST_DECADE, DECADES = -6, 8  # |log w| from 1e-6 to 1e2
HALF = BINS_PER_DECADE * DECADES
BINS = 2 * HALF + 1

SUMS_SIZE = len(SUMS) + BUCKETS * len(BUCKET_SUMS) + BUCKETS * BINS
MAXIMA_SIZE = len(MAXIMA) + len(FAULTS)

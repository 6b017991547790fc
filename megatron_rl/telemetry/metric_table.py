"""Every metric of a step: its name, unit, description and what it covers.

This is the one place that declares metrics. `python tools/reference_pages.py` makes the tables of
`docs/metrics.md` from it, and a test compares it with what runs record. `<...>` in a name stands
for a part that varies: a set, an epoch, a band.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    """One row of a table: metrics that share a description."""

    names: tuple[str, ...]
    unit: str
    description: str
    covers: str = ""


# fmt: off
# Rollouts, rewards and training; `covers`: what it averages over.
STEP = (
    Metric(("step",), "", "number of rollout batches so far"),
    Metric(("eval/<set>/avg@<k>", "eval/<set>/pass@<k>", "eval/<set>/maj@<k>"), "0..1", "[scores](evaluation.md) of k responses: mean reward; probability that one has a reward of 1 or more; reward of the most frequent answer", "set"),
    Metric(("eval_macro/avg@<k>", "eval_macro/pass@<k>", "eval_macro/maj@<k>"), "0..1", "mean over the sets with equal weight", "sets"),
    Metric(("eval/<set>/time_limit_fraction", "eval/<set>/failed_fraction"), "0..1", "responses not graded, counted as wrong", "set"),
    Metric(("eval/<set>/response_length_mean", "eval/<set>/truncated_fraction"), "", "as for `response/`", "set"),
    Metric(("eval/<set>/loss",), "nats", "loss on `sft.validation`", "set"),
    Metric(("reward/mean", "reward/std"), "", "mean and standard deviation of the rewards", "all"),
    Metric(("reward/<name>_mean",), "", "mean of one of several named rewards; 0 where a response was not graded", "all"),
    Metric(("reward_by_source/<source>",), "", "mean reward of one `data_source`", "all"),
    Metric(("reward/time_limit_fraction", "reward/failed_fraction"), "0..1", "responses whose grading timed out; whose verifier raised an error", "all"),
    Metric(("reward/retries",), "", "retries of the verifier", "all"),
    Metric(("reward/unparsable_truth_fraction",), "0..1", "ground truths that the verifier could not parse", "all"),
    Metric(("advantage/zero_fraction",), "0..1", "responses whose advantage (with `advantage.credit: turn`, each turn's; with a critic the mean before whitening) is 0", "all"),
    Metric(("advantage/zero_groups_fraction",), "0..1", "groups from which nothing is learned (TRL: `frac_reward_zero_std`)", "all"),
    Metric(("critic/loss",), "", "value loss ([Critic](critic.md))", "critic's updates"),
    Metric(("critic/explained_variance",), "", "1 - Var(return - value) / Var(return) over all updates: 1 if values are right, 0 if no better than a constant", "critic's updates"),
    Metric(("critic/value_mean", "critic/return_mean"), "", "means of values and of their target returns", "critic's updates"),
    Metric(("critic/clipped_fraction",), "0..1", "tokens whose value moved beyond `critic.value_clip` towards its target, so that it gets no gradient", "critic's updates"),
    Metric(("critic/grad_norm", "critic/learning_rate", "critic/updates"), "", "as of the policy", "critic's updates"),
    Metric(("response/length_mean", "response/length_max"), "", "length in tokens", "all"),
    Metric(("response/truncated_fraction",), "0..1", "responses cut at `rollout.max_response_tokens`, `max_context_tokens` or `max_turns`", "all"),
    Metric(("policy/entropy",), "nats", "entropy of the generating policy over the tokens that its sampler keeps", "computed"),
    Metric(("rollout/entropy",), "nats", "minus the mean log-prob of the sampled tokens", "all"),
    Metric(("rollout/tokens",), "", "tokens generated in this step", "new"),
    Metric(("rollout/tokens_per_second",), "1/s", "generation throughput over all engines", "new"),
    Metric(("rollout/engine_imbalance",), "", "slowest engine's seconds over the mean", "engines"),
    Metric(("rollout/weight_version",), "", "oldest version of the generating weights", "all"),
    Metric(("lag/steps_mean", "lag/steps_max"), "", "steps between generation and training ([policy lag](policy-lag.md))", "trained"),
    Metric(("lag/fraction_of_<lag>",), "0..1", "groups with that lag in steps", "trained"),
    Metric(("lag/updates_mean", "lag/updates_max"), "", "optimizer updates between generation and the step's first update", "trained"),
    Metric(("lag/versions_mean",), "", "versions between the weights that generated a token and the weights that train it; not offline", "trained"),
    Metric(("lag/waiting_groups", "lag/waiting_length_mean"), "", "groups not yet trained; mean length of their responses in tokens", "waiting"),
    Metric(("replay/fraction", "replay/max_uses"), "", "groups that earlier steps trained too; most steps that trained one group", "trained"),
    Metric(("mismatch/logprob_abs_diff_mean",), "nats", "mean abs(behavior - rollout log-prob)", "updates"),
    Metric(("train/computed_fraction",), "0..1", "responses that went through the actor", "all"),
    Metric(("train/updates",), "", "optimizer updates of the step"),
    Metric(("train/updates_skipped",), "", "updates skipped for a value that was not finite; should stay 0"),
    Metric(("train/early_stopped",), "0 or 1", "1 if `early_stopping` ended the reuse of the batch, or `critic.warmup_steps` left the policy as it is"),
    Metric(("train/masked_fraction",), "0..1", "responses excluded by `shaping.truncated: mask`, and lost conversations", "all"),
    Metric(("train/shared_rows_fraction",), "0..1", "rows of packs that [common beginnings](shared-prompts.md) save", "all"),
    Metric(("reward/shaped_mean",), "", "mean reward after `shaping`", "all"),
    Metric(("conversation/turns_mean", "conversation/turns_max"), "", "turns of the policy in a conversation", "trained"),
    Metric(("conversation/rewrites_mean", "conversation/rewrites_max"), "", "changes of the history of a conversation", "trained"),
    Metric(("conversation/observed_fraction",), "0..1", "tokens of responses that an environment wrote; not trained", "trained"),
    Metric(("conversation/context_max",), "", "tokens of the longest sequence that the policy read", "trained"),
    Metric(("conversation/timed_out_fraction", "conversation/failed_fraction"), "0..1", "conversations whose environment timed out or failed (reward 0)", "trained"),
    Metric(("conversation/rewritten_fraction",), "0..1", "more changes than `environment.max_rewrites` (reward 0)", "trained"),
    Metric(("conversation/lost_fraction",), "0..1", "conversations whose environment was lost; not trained", "trained"),
    Metric(("reward_by_turns/<turns>",), "", "mean reward of conversations with that number of turns", "trained"),
    Metric(("reward_of_turn/<turn>",), "", "mean reward after that turn, of conversations that reached it", "trained"),
    Metric(("environment/answers",), "", "turns that environments answered", "new"),
    Metric(("environment/seconds_mean",), "s", "from a turn's end to its answer in the engine", "new"),
    Metric(("environment/cached_fraction",), "0..1", "tokens before later turns from the engine's prefix cache", "new"),
    Metric(("dynamic/rounds",), "", "rounds of [dynamic sampling](reward-shaping.md#dynamic-sampling)", "new"),
    Metric(("dynamic/groups_generated",), "", "groups generated at first and in all rounds", "new"),
    Metric(("dynamic/groups_kept_for_later",), "", "surplus groups for the next steps", "new"),
    Metric(("dynamic/groups_lacking",), "", "groups with equal rewards after all rounds", "new"),
        Metric(("dynamic/tokens_dropped", "dynamic/dropped_length_mean"), "", "tokens of groups that are not trained; mean length of their responses", "dropped"),
    Metric(("tokens", "responses"), "", "number that the metrics below cover", "updates"),
    Metric(("tokens_with_advantage",), "", "tokens with a non-zero advantage, for `gate/` and the effective sample fraction", "updates"),
    Metric(("loss/policy", "loss/kl", "loss/entropy"), "", "terms of the loss, mean over updates", "updates"),
    Metric(("entropy",), "nats", "entropy of the trained policy, with an entropy term", "updates"),
    Metric(("grad/norm", "grad/norm_max"), "", "before clipping: mean and maximum over updates", "updates"),
    Metric(("optimizer/learning_rate",), "", "of the last update"),
)
# Policy drift and the constraint.
DRIFT = (
    Metric(("ratio/first_minibatch_max_deviation",), "", "largest abs(ratio - 1) in the first update: 0 without [policy lag](policy-lag.md)"),
    Metric(("ratio/max_deviation",), "", "largest abs(ratio - 1)"),
    Metric(("ratio/log_mean",), "nats", "mean log-ratio, policy minus behavior"),
    Metric(("ratio/log_to_reference_mean",), "nats", "mean log-ratio, policy minus reference, if the KL term uses sampled tokens: an estimate of KL(policy, reference)"),
    Metric(("ratio/kl_to_behavior",), "nats", "k3 estimate of the KL divergence from the behavior policy"),
    Metric(("ratio/chi_square",), "", "mean of (ratio - 1)^2, an estimate of the chi-square divergence from it"),
    Metric(("ratio/prefix_mean_log_mean", "ratio/prefix_mean_log_std"), "nats", "of the prefix-mean log-ratio S_t / t"),
    Metric(("ratio/prefix_mean_log_q05", "ratio/prefix_mean_log_median", "ratio/prefix_mean_log_q95"), "nats", "its quantiles, to a factor of 1.25"),
    Metric(("gate/acceptance",), "0..1", "tokens with non-zero advantage whose weight the constraint left unchanged; 1 without such tokens"),
    Metric(("gate/rejected_above_positive", "gate/rejected_above_negative"), "0..1", "tokens with that sign of advantage rejected above the upper bound"),
    Metric(("gate/rejected_below_positive", "gate/rejected_below_negative"), "0..1", "the same below the lower bound"),
    Metric(("weight/effective_sample_fraction",), "0..1", "(sum w)^2 / (n sum w^2) of the constrained weights of the n tokens with a non-zero advantage"),
    Metric(("weight/log_min", "weight/log_max"), "", "extremes of the objective's own log-weight"),
    Metric(("mismatch/logprob_diff_mean", "mismatch/logprob_diff_rms", "mismatch/logprob_abs_diff_max"), "nats", "behavior minus rollout log-prob"),
    Metric(("sampling/kept_mean", "sampling/kept_max"), "", "with `rollout.top_k`: tokens that the sampler kept for a draw ([Top-k](sampling.md))"),
    Metric(("sampling/one_kept_fraction",), "0..1", "tokens for which the sampler kept a single token: log-prob 0, no gradient"),
    Metric(("routing/changed_fraction", "routing/changed_fraction_by_layer/<layer>"), "0..1", "tokens whose experts in a layer differ from the behavior pass, over all layers, or in one layer, from 0; absent where [nothing is recorded](routing-replay.md#when-routes-are-recorded)"),

    Metric(("routing/engine_changed_fraction", "routing/engine_changed_fraction_by_layer/<layer>"), "0..1", "the same between actor and engine, with `model.routing_replay: engine`"),

    Metric(("routing/log_ratio_variance_fraction",), "", "variance over responses of the effect of these changes on the mean log-ratio, over the variance of the mean log-ratio; one pack of each replica after the last update"),
)
# The same by epoch of reuse and by position.
BY_EPOCH = (
    Metric(("epoch_<epoch>/<metric>",), "", "`gate/`, `ratio/`, `mismatch/`, `routing/changed_fraction` and the effective sample fraction of one epoch of reuse, from 1"),
    Metric(("epoch_<epoch>/routing/changed_fraction_by_layer/<layer>",), "", "the same by layer"),
    Metric(("by_fraction/<end>/<band>",), "", "tokens whose t/L lies in the tenth that ends there"),
    Metric(("by_position/<start>/<band>",), "", "tokens whose position t is at least that power of two and below the next"),
    Metric(("epoch_<epoch>/by_fraction/<end>/<band>",), "", "the same in one epoch of reuse"),
    Metric(("epoch_<epoch>/lag_<lag>/<kind>",), "", "tokens of that age in weight versions, in one epoch; absent if no token is older than the policy"),
    Metric(("epoch_<epoch>/lag_<lag>/by_fraction/<end>/<kind>",), "", "the same in each tenth of t/L"),
)
# Names within a band of positions: the last part of `by_...` metrics.
IN_A_BAND = (
    Metric(("acceptance", "rejected_above_positive", "rejected_above_negative", "rejected_below_positive", "rejected_below_negative"), "", "as in `gate/`"),
    Metric(("prefix_mean_log_mean", "prefix_mean_log_std", "prefix_mean_log_q05", "prefix_mean_log_median", "prefix_mean_log_q95"), "", "as in `ratio/`"),
    Metric(("effective_sample_fraction", "logprob_diff_mean", "logprob_diff_rms"), "", "as in `weight/`, `mismatch/`"),
)
# Seconds, memory, bytes.
COSTS = (
    Metric(("time/step",), "", "one line of `metrics.jsonl` to the next: the sum of the phases"),
    Metric(("time/rollout",), "", "generation"),
    Metric(("time/reward",), "", "grading that generation did not hide"),
    Metric(("time/pack",), "", "advantages, packs and minibatches"),
    Metric(("time/behavior", "time/reference"), "", "log-probs of the behavior and reference policies"),
    Metric(("time/train",), "", "the updates"),
    Metric(("time/critic",), "", "values, advantages and the critic's updates"),
    Metric(("time/sync",), "", "the weight push"),
    Metric(("time/eval",), "", "evaluation"),
    Metric(("time/record",), "", "gathering records, which a thread writes"),
    Metric(("time/checkpoint",), "", "saving, and checking for an interruption; counted in the next step"),
    Metric(("time/start_<part>",), "", "first line only: from the start of the command to the first step of rank 0; `imports`, `checks`, `megatron`, `verifiers`, `vllm` (offline: `rollouts`), `push`, `engine_check`, `evaluation`"),
    Metric(("memory/<phase>_peak_gib",), "", "largest memory of any rank in a phase"),
    Metric(("memory/host_gib", "memory/host_free_gib"), "", "largest rank's host memory after a step; the least free memory of any host, or of its control group (container, job). A run warns before a falling line through the last 50 steps reaches 0"),
    Metric(("sync/seconds", "sync/plan_seconds", "sync/pack_seconds", "sync/transfer_seconds", "sync/unpack_seconds", "sync/load_seconds", "sync/cache_reset_seconds", "sync/verify_seconds"), "", "the push and [its parts](resharding.md#metrics-of-a-push)"),
    Metric(("sync/bytes_sent", "sync/bytes_local"), "", "sent between ranks, copied within ranks"),
    Metric(("sync/gigabytes_per_second",), "", "bytes sent per second"),
)
# fmt: on
TABLES = STEP, DRIFT, BY_EPOCH, IN_A_BAND, COSTS  # in the order of the page

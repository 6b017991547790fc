"""What keeps a run from learning, or makes it slow without a word: said as it is seen."""

from collections import Counter

from megatron_rl.config import Config
from megatron_rl.trainer.rollout_batch import RolloutBatch


def describe_slow_packs(config: Config) -> str | None:
    """A warning where the longest sequence does not fit into a pack."""
    budget, longest = config.trainer.tokens_per_micro_batch, config.max_model_tokens
    if budget >= longest:
        return None
    return (
        f"warning: trainer.tokens_per_micro_batch={budget} is below the longest prompt plus "
        f"response ({longest} tokens): micro-batches hold about one response each, which is "
        f"several times slower; set it to {longest} or more"
    )


def describe_no_learning(batch: RolloutBatch, config: Config) -> str | None:
    """A warning where no response of a rollout batch can move the policy as it should."""
    responses = [rollout.response for rollout in batch.rollouts]
    told = []
    if all(response.finish_reason == "length" for response in responses):
        told.append(
            f"every response was cut at rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}, so none came to its end: raise it, or see in "
            "rollouts/ whether the model ever writes the end token of its generation_config.json"
        )
    if not batch.advantages.any():
        reward = batch.rollouts[0].verdict.reward
        if all(rollout.verdict.reward == reward for rollout in batch.rollouts):
            what = f"every response got the same reward, {reward:g}"
        else:
            what = "within each group all responses got the same reward"
        reasons = Counter(rollout.verdict.reason for rollout in batch.rollouts)
        reason, count = reasons.most_common(1)[0]
        told.append(
            f"{what}, so no advantage differs from 0 and nothing is learned ({count} of "
            f"{len(responses)} verdicts say {reason!r}): see rollouts/ for what the model wrote, "
            "and take prompts that it solves sometimes"
        )
    return "warning: " + "; ".join(told) if told else None

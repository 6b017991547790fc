"""From a verdict to the reward that is trained on, and which responses are learned from at all.

DAPO (arXiv 2503.14476): rewards of +1 and -1 (equation 7), soft overlong punishment (equation 13)
and overlong filtering (section 3.4).
"""

from megatron_rl.config import Config
from megatron_rl.types import Rollout


def shape_reward(rollout: Rollout, config: Config) -> float:
    """The reward of a rollout by `shaping`; the verdict's own where that is not set."""
    shaping, limit = config.shaping, config.rollout.max_response_tokens
    reward = rollout.verdict.reward
    if shaping.signed:
        reward = 2 * reward - 1
    if shaping.overlong is None:
        return reward
    penalty = shaping.overlong.penalty
    if shaping.overlong.kind == "hard":
        return -penalty if is_truncated(rollout) else reward
    length = len(rollout.response.token_ids)
    return reward - penalty * overlong_fraction(length, limit=limit, buffer=shaping.overlong.buffer)


def overlong_fraction(length: int, *, limit: int, buffer: int) -> float:
    """0 up to `limit - buffer` tokens, then linearly to 1 at `limit`."""
    return min(max((length - (limit - buffer)) / buffer, 0.0), 1.0)


def is_truncated(rollout: Rollout) -> bool:
    """Whether the response was cut at the limit."""
    return rollout.response.finish_reason == "length"


def is_masked(rollout: Rollout, config: Config) -> bool:
    """Whether nothing is learned from the response's tokens."""
    return config.shaping.truncated == "mask" and is_truncated(rollout)

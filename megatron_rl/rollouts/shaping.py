"""Reward shaping: the reward that is trained on, and the mask of trained responses.

DAPO (arXiv 2503.14476): rewards of +1 and -1 (equation 7), soft overlong punishment (equation 13)
and overlong filtering (section 3.4).
"""

from megatron_rl.config import Config
from megatron_rl.environments.interface import FAILURE_REASONS
from megatron_rl.rewards.verifier import UNGRADED
from megatron_rl.types import Rollout

NOT_GRADED = {*UNGRADED, *FAILURE_REASONS.values()}


def shape_reward(rollout: Rollout, config: Config) -> float:
    """Reward of a rollout after `shaping`; without it the reward of the grader."""
    shaping, limit = config.shaping, config.rollout.max_response_tokens
    reward = rollout.grade_result.reward
    # 0 is halfway between wrong and right: a failure to grade is not an error of the response.
    if shaping.signed and is_graded(rollout):
        reward = 2 * reward - 1
    if shaping.overlong is None:
        return reward
    penalty = shaping.overlong.penalty
    if shaping.overlong.kind == "hard":
        return -penalty if is_truncated(rollout) else reward
    length = rollout.response.length
    return reward - penalty * overlong_fraction(length, limit=limit, buffer=shaping.overlong.buffer)


def is_graded(rollout: Rollout) -> bool:
    """True if the reward is that of the response: neither grader nor environment failed."""
    return rollout.grade_result.reason not in NOT_GRADED


def overlong_fraction(length: int, *, limit: int, buffer: int) -> float:
    """0 up to `limit - buffer` tokens, then linearly to 1 at `limit`."""
    return min(max((length - (limit - buffer)) / buffer, 0.0), 1.0)


def is_truncated(rollout: Rollout) -> bool:
    """True if the response was truncated at the token limit."""
    return rollout.response.finish_reason == "length"


def is_masked(rollout: Rollout, config: Config) -> bool:
    """True if the tokens of the response are not trained.

    A lost environment is a failure of the machines and not of the response; all other failures of
    an environment are trained, because what the policy wrote may have caused them.
    """
    if rollout.response.finish_reason == "lost":
        return True
    return config.shaping.truncated == "mask" and is_truncated(rollout)

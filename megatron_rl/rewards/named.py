"""Named rewards of a response and their weighted sum."""

import math
from collections.abc import Mapping

from megatron_rl.errors import UserError

SHAPED = "shaped"  # reward/shaped_mean is another metric


class NamedRewards:
    """The weighted sum of the rewards that a verifier returns by name.

    weights: by name; if empty, 1 for each. Every response must have the same names, so that the
    means of all rewards cover the same responses.
    """

    def __init__(self, weights: Mapping[str, float], *, verifier: str) -> None:
        self._weights, self._verifier = dict(weights), verifier
        self._names: list[str] | None = sorted(weights) if weights else None

    def add_up(self, reward: float | Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Return the weighted sum and the rewards by name (none for a single number).

        Raises ValueError if a name is missing or unknown, or if the sum is too large.
        """
        rewards = dict(reward) if isinstance(reward, Mapping) else {}
        if self._names is None:
            self._names = sorted(rewards)
        if sorted(rewards) != self._names:
            raise UserError(self._describe_difference(sorted(rewards)))
        if not isinstance(reward, Mapping):
            return reward, {}
        # Exactly rounded, so that the order of the names does not matter.
        total = math.fsum(self._weights.get(name, 1.0) * value for name, value in rewards.items())
        if not math.isfinite(total):
            raise UserError(f"the weighted sum of {self._verifier}'s rewards {rewards} overflows")
        return total, rewards

    def _describe_difference(self, names: list[str]) -> str:
        returned = f"rewards named {', '.join(names)}" if names else "a single reward"
        expected = ", ".join(self._names or ())
        if self._weights:
            return (
                f"{self._verifier} returned {returned}, and reward.weights has {expected}; give "
                "each reward that it returns one weight, and no other name"
            )
        return (
            f"{self._verifier} returned {returned} for this response and "
            f"{expected or 'a single reward'} for an earlier one; return the same names for every "
            "response, with 0 where one does not apply"
        )

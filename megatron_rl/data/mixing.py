"""Mix several prompt sets by weight, and order their prompts over a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.data.prompts import PromptOrder
from megatron_rl.errors import UserError
from megatron_rl.runtime.seeds import derive_seed


@dataclass(frozen=True)
class PromptMix:
    """The prompts of each step, a function of (sizes, weights, seed, step).

    Every step contains the same number of prompts of each set, in proportion to its weight up to
    rounding. Each set has its own `PromptOrder`; within a step the sets are shuffled together.
    """

    sizes: tuple[int, ...]  # prompts in each set
    weights: tuple[float, ...]
    seed: int

    def indices(self, step: int, count: int) -> list[int]:
        """Indices of the `count` different prompts of `step` in all sets one after the other.

        Raises ValueError if a set is too small for its share, or gets none.
        """
        shares = share(count, self.weights)
        indices: list[int] = []
        start = 0
        for number, (size, part) in enumerate(zip(self.sizes, shares, strict=True)):
            order = PromptOrder(size, derive_seed(self.seed, "prompt mix", number))
            indices += [start + index for index in order.indices(step, part)]
            start += size
        keys = np.random.PCG64(derive_seed(self.seed, "prompts of a step", step)).random_raw(count)
        return [indices[place] for place in np.argsort(keys, kind="stable")]


def share(count: int, weights: Sequence[float]) -> list[int]:
    """`count` divided in the ratio of the weights, rounded by largest remainders.

    ValueError where one gets nothing.
    """
    exact = [count * weight / sum(weights) for weight in weights]
    shares = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: shares[place] - exact[place])
    for place in by_remainder[: count - sum(shares)]:
        shares[place] += 1
    if 0 in shares:
        raise UserError(
            f"weights {', '.join(f'{weight:g}' for weight in weights)} give a set none of "
            f"rollout.prompts_per_step={count}; raise its weight, or rollout.prompts_per_step"
        )
    return shares

"""What one step generates and trains on: how many responses, how long, in which packs.

How long responses are is unknown before a run. The lengths of a plan are the quantiles of a
log-normal distribution, cut off at the limit as responses are, in a fixed shuffled order.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

from megatron_rl.config import Config
from megatron_rl.data.packing import assign_packs, padded_length

SPREAD = 0.8  # of the logarithm of a length: the 84th percentile is 2.2 times the median
MEAN_PART = 0.45  # of the longest allowed response that the mean one has, where nothing is said
MEAN_PROMPT = 160  # tokens; of DAPO-Math-17k about


@dataclass(frozen=True)
class Workload:
    """One step's responses and updates; lengths in tokens."""

    prompts: int
    samples: int
    minibatches: int
    epochs: int
    max_prompt: int
    max_response: int
    mean_prompt: int
    mean_response: int
    max_sequences: int  # that one engine generates at once

    @property
    def responses(self) -> int:
        """Of one step."""
        return self.prompts * self.samples

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.max_prompt + self.max_response

    def response_lengths(self) -> tuple[int, ...]:
        """Of every response of a step, in the order of generating."""
        return clipped_lengths(self.responses, self.mean_response, self.max_response)

    def packs(self, *, ranks: int, budget: int, alignment: int) -> Packs:
        """One minibatch of the busiest data-parallel rank, packed as the trainer packs it."""
        return _packs(self, ranks, budget, alignment)


@dataclass(frozen=True)
class Packs:
    """Packs of one rank: how many, and of a mean one tokens and squared lengths in all."""

    count: int
    tokens: float
    squares: float


def workload_of(
    config: Config, *, mean_prompt: int | None = None, mean_response: int | None = None
) -> Workload:
    """The workload that a config describes; what it cannot know is assumed."""
    longest = config.rollout.max_response_tokens
    return Workload(
        prompts=config.rollout.prompts,
        samples=config.rollout.responses_per_prompt,
        minibatches=config.trainer.minibatches,
        epochs=config.trainer.epochs,
        max_prompt=config.data.max_prompt_tokens,
        max_response=longest,
        mean_prompt=mean_prompt or min(MEAN_PROMPT, config.data.max_prompt_tokens),
        mean_response=mean_response or max(1, round(MEAN_PART * longest)),
        max_sequences=config.rollout.max_sequences,
    )


@lru_cache(maxsize=64)
def clipped_lengths(count: int, mean: int, limit: int) -> tuple[int, ...]:
    """Quantiles of a log-normal distribution cut off at `limit`, whose mean is then `mean`.

    Raises ValueError for a mean that no such distribution has.
    """
    if not 0 < mean <= 0.95 * limit:
        raise ValueError(
            f"a mean response of {mean} tokens, cut off at {limit}: choose one from 1 to "
            f"{int(0.95 * limit)}"
        )
    normal = NormalDist()
    deviations = [normal.inv_cdf((place + 0.5) / count) for place in range(count)]

    def lengths(median: float) -> list[float]:
        return [min(limit, median * math.exp(SPREAD * deviation)) for deviation in deviations]

    low, high = 1.0, 100.0 * limit
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fmean(lengths(middle)) < mean else (low, middle)
    found = [max(1, round(length)) for length in lengths(low)]
    random.Random(0).shuffle(found)
    return tuple(found)


# Tokens of a sequence for which attention costs about as much as the matrix products.
EVEN = 20_000


@lru_cache(maxsize=512)
def _packs(workload: Workload, ranks: int, budget: int, alignment: int) -> Packs:
    count = workload.responses // workload.minibatches
    lengths = [
        padded_length(workload.mean_prompt + length - 1, alignment=alignment)
        for length in workload.response_lengths()[:count]
    ]
    assigned = assign_packs(lengths, budget=budget // alignment * alignment, ranks=ranks)
    sums = []
    for packs in assigned:
        of_rank = [lengths[i] for pack in packs for i in pack]
        sums.append((sum(of_rank), sum(length**2 for length in of_rank)))
    tokens, squares = max(sums, key=lambda each: EVEN * each[0] + each[1])
    number = max(map(len, assigned))
    return Packs(number, tokens / number, squares / number)

"""Workload of one step: the number of responses, their lengths and packs.

Response lengths are unknown before a run. Planning uses the quantiles of a log-normal distribution,
truncated at the response limit, in a fixed shuffled order.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean

from megatron_rl.config import Config
from megatron_rl.data.packing import assign_packs, padded_length
from megatron_rl.errors import UserError

SPREAD = 0.8  # standard deviation of log length: the 84th percentile is 2.2 times the median
MEAN_PART = 0.45  # default mean response length as a fraction of the limit
MEAN_PROMPT = 160  # tokens; approximately that of DAPO-Math-17k


@dataclass(frozen=True)
class Workload:
    """Responses and updates of one step; lengths in tokens."""

    prompts: int
    samples: int
    minibatches: int
    epochs: int
    max_prompt: int
    max_response: int
    mean_prompt: int
    mean_response: int
    max_num_seqs: int  # concurrent sequences per engine

    @property
    def responses(self) -> int:
        """Number of responses of one step."""
        return self.prompts * self.samples

    @property
    def longest(self) -> int:
        """Maximum tokens of prompt plus response."""
        return self.max_prompt + self.max_response

    def response_lengths(self) -> tuple[int, ...]:
        """Return the length of every response of a step, in generation order."""
        return clipped_lengths(self.responses, self.mean_response, self.max_response)

    def packs(self, *, ranks: int, budget: int, alignment: int) -> Packs:
        """Pack one minibatch as the trainer does; return the busiest data-parallel rank's packs."""
        return _packs(self, ranks, budget, alignment)


@dataclass(frozen=True)
class Packs:
    """Number of packs of one rank, and their mean tokens and mean sum of squared lengths."""

    count: int
    tokens: float
    squares: float


def workload_of(
    config: Config, *, mean_prompt: int | None = None, mean_response: int | None = None
) -> Workload:
    """Return the workload of a config, with default mean lengths."""
    longest = config.max_packed_tokens - config.data.max_prompt_tokens  # with observations
    return Workload(
        prompts=config.rollout.prompts_per_step,
        samples=config.rollout.responses_per_prompt,
        minibatches=config.trainer.minibatches,
        epochs=config.trainer.epochs,
        max_prompt=config.data.max_prompt_tokens,
        max_response=longest,
        mean_prompt=mean_prompt or min(MEAN_PROMPT, config.data.max_prompt_tokens),
        mean_response=mean_response or max(1, round(MEAN_PART * longest)),
        max_num_seqs=config.rollout.max_num_seqs,
    )


@lru_cache(maxsize=64)
def clipped_lengths(count: int, mean: int, limit: int) -> tuple[int, ...]:
    """Return quantiles of a log-normal distribution truncated at `limit`, with mean `mean`.

    Raises UserError if no such distribution has this mean.
    """
    if not 0 < mean <= 0.95 * limit:
        raise UserError(
            f"a mean response of {mean} tokens is impossible with a limit of {limit}: choose 1 to "
            f"{int(0.95 * limit)}"
        )
    normal = NormalDist()
    deviations = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]

    def lengths(median: float) -> list[float]:
        return [min(limit, median * math.exp(SPREAD * deviation)) for deviation in deviations]

    low, high = 1.0, 100.0 * limit
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fmean(lengths(middle)) < mean else (low, middle)
    rounded = [max(1, round(length)) for length in lengths(low)]
    random.Random(0).shuffle(rounded)
    return tuple(rounded)


# Sequence length at which attention costs about as much as the matrix products.
BREAK_EVEN = 20_000


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
    tokens, squares = max(sums, key=lambda each: BREAK_EVEN * each[0] + each[1])
    number = max(map(len, assigned))
    return Packs(number, tokens / number, squares / number)

"""The seam between training and generation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.push import SyncStats, WeightHolder
from megatron_rl.types import Prompt, Response, SamplingSettings

Progress = Callable[[int, int], None]  # responses finished here, responses to generate here
Ended = Callable[[int, Response], None]  # the place of a response among all, and the response


@dataclass(frozen=True)
class Part:
    """Responses that are generated in parts: what is asked, what is there, how far to go now.

    `sampling.max_tokens` is where a response ends, `tokens` where it pauses.
    """

    prompts: Sequence[Prompt]
    samples: int  # to each
    sampling: SamplingSettings
    tokens: int
    begun: Sequence[Response] = ()  # by prompt, then sample; empty before the first time


class GenerationStopped(Exception):  # noqa: N818 - no error
    """The engine was asked to stop before all responses had ended; none of them is kept."""


class RolloutEngine(Protocol):
    """What training asks of an engine: it answers with the weights that were pushed last.

    Every call is collective. What a push asks of it is `resharding.push.WeightReceiver`.
    """

    layout: EngineLayout
    dtype: torch.dtype

    @property
    def weight_version(self) -> int:
        """The version of the weights that were received last; -1 before the first."""
        ...

    @property
    def engine_seconds(self) -> Sequence[float]:
        """What each engine took for its part of the last `generate`; the same on every rank."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: SamplingSettings,
        on_progress: Progress | None = None,
        on_response: Ended | None = None,
    ) -> list[Response]:
        """`samples` responses to each prompt, ordered by prompt, then sample; all on every rank.

        `on_response` is called as responses end, for each of them on one rank.

        Prompt i is answered by engine i modulo the number of engines.
        The same prompts and seed give the same responses whatever the engines' layout. Raises on
        every rank when an engine fails, hangs, dies or takes too long, and GenerationStopped where
        any was asked to stop.
        """
        ...

    def extend(self, parts: Sequence[Part], *, keep_cache: bool) -> list[list[Response]]:
        """Bring the responses of each part to its number of tokens by the present weights."""
        ...

    def forget(self) -> None:
        """Let go of the keys and values of all that is under way; it can still go on."""
        ...

    def push_weights(self, actor: WeightHolder, *, version: int) -> SyncStats:
        """Bring the actor's present weights into this engine; raises unless all of them arrive."""
        ...

    def sleep(self) -> None:
        """Give the device's memory to training, until weights are pushed."""
        ...

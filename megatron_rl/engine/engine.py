"""Interface between training and generation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_rl.data.rendering import TurnRenderer
from megatron_rl.environments.pool import EnvironmentPool
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.push import SyncStats, WeightSource
from megatron_rl.types import Prompt, Response, SamplingSettings

ProgressCallback = Callable[[int, int, int, int], None]
"""Receives finished and total responses of this engine, the tokens that it has generated, and about
how many it will generate (0: unknown)."""
OnFinished = Callable[[int, Response], None]  # position among all responses, response


@dataclass(frozen=True)
class EngineHooks:
    """Callbacks from an engine to the run that it generates for."""

    on_step: Callable[[], object] = lambda: None
    """Called in each engine step and while waiting for other engines: this rank is alive."""
    on_memory_released: Callable[[int], object] = lambda _: None
    """Receives the bytes that the sleeping engine has released; 0 before it wakes up."""
    should_stop: Callable[[], bool] = lambda: False
    """Returns whether to stop generating because the run was interrupted."""


@dataclass(frozen=True)
class RolloutWindow:
    """Responses generated in several parts, with the tokens that exist and the next limit.

    A response ends at `sampling.max_tokens` tokens at the latest and pauses at `tokens`.
    """

    prompts: Sequence[Prompt]
    samples: int  # per prompt
    sampling: SamplingSettings
    tokens: int
    started: Sequence[Response] = ()  # by prompt, then sample; empty at first


@dataclass(frozen=True)
class ConversationSettings:
    """Environments and limits of conversations.

    pool: on the first rank of each engine, None on its other ranks. in_rounds: continue all
    conversations together once every turn is answered, so that batches, and with them rounding on a
    device, do not depend on the speed of the environments. journals: folder of `record`.
    """

    pool: EnvironmentPool | None
    renderer: TurnRenderer
    max_turns: int
    max_turn_tokens: int
    in_rounds: bool = False
    journals: Path | None = None

    def record(self, name: str) -> None:
        """Record answers in the journal `name` from now on, and reuse the answers that it has."""
        if self.pool is not None and self.journals is not None:
            self.pool.use_journal(self.journals / name)


class EngineFeature(Protocol):
    """An ability of an engine that vLLM must be started with."""

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments."""
        ...

    def start(self, llm: Any) -> None:
        """Begin to use the started vLLM."""
        ...


class GenerationStopped(Exception):  # noqa: N818 - not an error
    """Generation was interrupted before all responses were finished; all are discarded."""


class WeightSink(Protocol):
    """Receiver of the trained weights: engines, here or on other ranks, or nothing.

    Every call is collective. Weight sync uses `resharding.push.WeightReceiver`.
    """

    shares_devices: bool
    """True if it runs on the ranks that train, in turn with the actor."""

    @property
    def weight_version(self) -> int:
        """Version of the weights received last; -1 before the first."""
        ...

    def sync_weights(self, actor: WeightSource, *, version: int) -> SyncStats:
        """Copy the actor's current weights into this engine; raises unless all of them arrive."""
        ...

    def sleep(self) -> None:
        """Release the device memory for training until the next weight sync."""
        ...


class Responder(Protocol):
    """Engines that answer prompts in one turn, by the weights synced last. Collective."""

    @property
    def layout(self) -> EngineLayout:
        """Ranks and tensor parallel size of all engines."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the engines' weights."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: SamplingSettings | Sequence[SamplingSettings],
    ) -> list[Response]:
        """Return `samples` responses per prompt on every rank, ordered by prompt, then sample.

        sampling: settings for all prompts, or one per prompt.

        Engine i % num_engines answers prompt i. The same prompts and seed give the same responses
        for every engine layout. Raises on every rank if an engine fails, hangs, dies or exceeds
        the time limit, and GenerationStopped if any rank received a request to stop.
        """
        ...


class RolloutEngine(Responder, Protocol):
    """Generation on this rank, as sources of rollouts use it. Every call is collective."""

    environment_costs: Mapping[str, float]
    """Counts of the last `generate` with conversations, over all engines: `answers`, the `seconds`
    waited for them, failures by kind, and tokens after the first turn, in all (`context_tokens`)
    and from the prefix cache (`cached_tokens`)."""

    @property
    def engine_seconds(self) -> Sequence[float]:
        """Seconds each engine spent on its part of the last `generate`; the same on every rank."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: SamplingSettings | Sequence[SamplingSettings],
        on_progress: ProgressCallback | None = None,
        on_response: OnFinished | None = None,
        on_all_ranks: bool = True,
        conversations: ConversationSettings | None = None,
    ) -> list[Response]:
        """Return responses as `Responder.generate` does.

        on_response: called on one rank for each response as soon as it is finished.
        on_all_ranks: every rank receives tokens, log-probs and texts; otherwise only rank 0 and the
            rank that generated them (`types.Response.owner`).
        conversations: each response is a conversation with an environment; None: one turn.
        """
        ...

    def continue_generation(
        self, parts: Sequence[RolloutWindow], *, keep_cache: bool
    ) -> list[list[Response]]:
        """Continue the responses of each window up to its token limit with the current weights."""
        ...

    def drop_caches(self) -> None:
        """Drop the KV cache of all unfinished responses; continuing them recomputes it."""
        ...

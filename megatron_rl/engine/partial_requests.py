"""Responses whose generation continues across weight syncs, on one engine.

A response is generated up to its token limit, whatever else runs; then its request is paused, the
weights may change, and it continues. Either its KV cache is kept, so that later tokens attend to
keys and values of older weights, or it is recomputed by a new request whose prompt is the original
prompt plus all tokens so far.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_rl.data.token_rows import fetch_responses
from megatron_rl.engine.engine import RolloutWindow
from megatron_rl.engine.requests import (
    POLL_INTERVAL_STEPS,
    StallLimit,
    sampling_params,
)
from megatron_rl.engine.sampling_masks import EngineSamplingMasks, join_masks
from megatron_rl.engine.starting import preserved_generators
from megatron_rl.engine.stopping import StopCriterion
from megatron_rl.errors import UserError
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import FinishReason, Prompt, Response, columns_of

NO_ROOM = (
    "the engine's KV cache is too small for all unfinished responses, and some would lose their "
    "keys and values; raise rollout.kv_cache_mib or rollout.gpu_memory_utilization, or lower "
    "rollout.prompts_per_step"
)
Key = tuple[int, int, int]  # seed of the window, prompt, sample
Assigned = tuple[int, Key, Prompt, Response | None, RolloutWindow]


@dataclass
class PartialRequest:
    """One response that vLLM is generating or has paused."""

    name: str  # ours
    request: str  # vLLM's
    tokens: list[int]
    logprobs: list[float]
    limit: int  # tokens at which it pauses
    version: int = -1  # of the weights that generate it now
    finish_reason: FinishReason = "unfinished"
    masks: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # of its tokens

    def append(self, output: Any, masks: EngineSamplingMasks | None) -> None:
        """Add the tokens of one engine step."""
        completion = output.outputs[0]
        self.tokens += completion.token_ids
        self.logprobs += completion.logprobs.logprobs
        if masks is not None:
            self.masks.append(masks.of(output))
        if output.finished:
            self.finish_reason = "stop" if completion.finish_reason == "stop" else "length"

    @property
    def is_done(self) -> bool:
        """True once the response is finished or has reached its current limit."""
        return self.finish_reason != "unfinished" or len(self.tokens) >= self.limit


@dataclass
class PartialRequests:
    """Unfinished responses of this rank's engine, identical on all of its ranks."""

    core: Any  # vLLM's LLMEngine
    stop: StopCriterion
    masks: EngineSamplingMasks | None = None
    max_num_seqs: int | None = None  # including paused requests; None: unlimited
    paused: dict[Key, PartialRequest] = field(default_factory=dict)
    # vLLM's names of paused requests that continue as soon as the engine has a free place
    resumed: deque[str] = field(default_factory=deque)
    version: int = -1  # of the engine's weights
    lora_request: Any = None  # vLLM's LoRARequest of that version; None: weights without adapters

    def run(
        self,
        assigned: Sequence[tuple[Key, Prompt, Response | None, RolloutWindow]],
        *,
        stall_limit: float,
        on_step: Callable[[], object] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[Key, PartialRequest]:
        """Continue each response up to the token limit of its window, or to its end.

        Paused requests continue; a response without one gets a new request, which recomputes its
        KV cache. Any error leaves no request in flight; TimeoutError after `stall_limit` seconds
        in which none got there, and GenerationStopped if `should_stop` returned true, are raised on
        all ranks of the engine.
        """
        live: dict[Key, PartialRequest] = {}
        masks = None
        if self.masks is not None:
            masks = self.masks.begin(part.sampling for *_, part in assigned)
        limits = StallLimit(stall_limit)
        try:
            with preserved_generators(), limits.hard_timeout() as made_progress:
                for key, prompt, started, part in assigned:
                    live[key] = self._resume(key, prompt, started, part)
                if self.max_num_seqs is not None and len(live | self.paused) > self.max_num_seqs:
                    raise UserError(
                        f"{len(live | self.paused)} unfinished responses on one engine exceed "
                        f"rollout.max_num_seqs={self.max_num_seqs}; raise it, or lower "
                        f"rollout.prompts_per_step"
                    )
                remaining = {
                    partial.request: partial for partial in live.values() if not partial.is_done
                }
                steps = 0
                while remaining:
                    if steps % POLL_INTERVAL_STEPS == 0:
                        finished = len(assigned) - len(remaining)
                        limits.check(None, should_stop(), finished, len(assigned))
                    steps += 1
                    before = len(remaining)
                    self._step(remaining, masks)
                    if len(remaining) < before:
                        limits.made_progress()
                        made_progress()
                    on_step()
        except BaseException:
            self.paused |= live
            self.drop_caches()
            raise
        self.paused |= {
            key: partial for key, partial in live.items() if partial.finish_reason == "unfinished"
        }
        return live

    def _resume(
        self, key: Key, prompt: Prompt, started: Response | None, part: RolloutWindow
    ) -> PartialRequest:
        partial = self.paused.pop(key, None)
        if partial is not None:
            partial.limit = part.tokens
            if self.lora_request is None:  # else it ends with the adapters that it began with
                partial.version = self.version
            if not partial.is_done:
                self.resumed.append(partial.request)
            return partial
        tokens = [] if started is None else started.token_ids.tolist()
        logprobs = [] if started is None else started.rollout_logprobs.tolist()
        sampling = part.sampling
        if tokens:  # a new request starts a new generator
            seed = derive_seed(sampling.seed, "continued after", len(tokens))
            sampling = replace(sampling, seed=seed, max_tokens=sampling.max_tokens - len(tokens))
        params = sampling_params(
            sampling, prompt=prompt, sample=key[2], stop=self.stop, each_step=True
        )
        name = f"{'-'.join(map(str, key))}-{time.monotonic_ns()}"
        request = self.core.add_request(
            name, {"prompt_token_ids": [*prompt.token_ids, *tokens]}, params,
            lora_request=self.lora_request,
        )  # fmt: skip
        masks = [] if started is None else [(started.mask_ids, started.mask_counts)]
        return PartialRequest(
            name, request, tokens, logprobs, part.tokens, self.version, masks=masks
        )

    def _step(
        self, remaining: dict[str, PartialRequest], masks: EngineSamplingMasks | None
    ) -> None:
        """Run one engine step and pause the requests that have reached their limit."""
        scheduler = self._scheduler
        before = {name: scheduler.requests[name].num_preemptions for name in remaining}
        names = {partial.name: partial for partial in remaining.values()}
        while self.resumed and len(scheduler.running) < scheduler.max_num_running_reqs:
            scheduler.running.append(scheduler.requests[self.resumed.popleft()])
        outputs = self.core.step()
        if not outputs and not scheduler.running:
            raise RuntimeError(NO_ROOM)
        for output in outputs:
            partial = names[output.request_id]
            partial.append(output, masks)
            if partial.is_done:
                del remaining[partial.request]
                if partial.finish_reason == "unfinished":
                    scheduler.running.remove(scheduler.requests[partial.request])
        if any(scheduler.requests[name].num_preemptions > before[name] for name in remaining):
            raise RuntimeError(NO_ROOM)

    def drop_caches(self) -> None:
        """Abort all requests; continuing their responses recomputes the KV cache."""
        self.core.abort_request([partial.name for partial in self.paused.values()])
        self.paused.clear()
        self.resumed.clear()

    @property
    def is_running(self) -> bool:
        """True if the next engine step would process any request."""
        running, waiting = self._scheduler.get_request_counts()
        return running + waiting > 0

    @property
    def _scheduler(self) -> Any:
        return self.core.engine_core.engine_core.scheduler


def assign_requests(parts: Sequence[RolloutWindow], *, engine: int, engines: int) -> list[Assigned]:
    """List one engine's unfinished responses: their positions among all, and arguments of `run`.

    Engine i % engines answers prompt i of a window.
    """
    assigned, first = [], 0
    for part in parts:
        for position in range(len(part.prompts) * part.samples):
            prompt = position // part.samples
            started = part.started[position] if part.started else None
            finished = started is not None and started.finish_reason != "unfinished"
            if prompt % engines == engine and not finished:
                sample = position % part.samples
                key = (part.sampling.seed, part.prompts[prompt].index, sample)
                assigned.append((first + position, key, part.prompts[prompt], started, part))
        first += len(part.prompts) * part.samples
    return assigned


def fetch_started(
    parts: Sequence[RolloutWindow], paused: Collection[Key], *, engine: int, engines: int
) -> list[Assigned]:
    """Assign requests as below, with the tokens that each continues on this rank; collective.

    A paused request has its tokens. After a restart the tokens of other requests may be on a rank
    of another engine.
    """

    def bring(part: RolloutWindow) -> RolloutWindow:
        assigned = assign_requests([part], engine=engine, engines=engines)
        needed = [position for position, key, _, started, _ in assigned
                  if started is not None and key not in paused]  # fmt: skip
        return replace(part, started=fetch_responses(part.started, needed))

    return assign_requests(list(map(bring, parts)), engine=engine, engines=engines)


def find_owners(parts: Sequence[RolloutWindow]) -> dict[int, int]:
    """Return the owners of responses that have begun, by their position among all."""
    owners, first = dict[int, int](), 0
    for part in parts:
        owners |= {first + i: one.owner for i, one in enumerate(part.started) if one.owner >= 0}
        first += len(part.prompts) * part.samples
    return owners


def merge_outputs(
    parts: Sequence[RolloutWindow], new: Mapping[int, Response]
) -> list[list[Response]]:
    """Merge newly generated tokens, and their weight version, into the responses of each window."""
    responses, first = [], 0
    for part in parts:
        count = len(part.prompts) * part.samples
        responses.append(
            [
                _extend(part.started[position] if part.started else None, new[first + position])
                if first + position in new
                else part.started[position]
                for position in range(count)
            ]
        )
        first += count
    return responses


def _extend(started: Response | None, new: Response) -> Response:
    """Return a response with the engine's columns of `new`, which has all tokens so far."""
    if started is None:
        return new
    length, version = len(started.token_ids), new.weight_version
    later = started.later_versions
    if len(new.token_ids) > length and started.versions[-1][1] != version:
        later = (*later, (length, version))
    rows = {column.name: new.row(column.name) for column in columns_of([new])
            if column.by == "engine"}  # fmt: skip
    return replace(
        started.with_rows(rows),
        text=new.text,
        finish_reason=new.finish_reason,
        later_versions=later,
        owner=new.owner,  # a checkpoint's response is on every rank; its new tokens are not
    )


def as_response(key: Key, prompt: Prompt, live: PartialRequest, tokenizer: Any) -> Response:
    """Return what the engine has generated so far; its version is that of the last window."""
    finished = live.finish_reason != "unfinished"
    return Response(
        prompt_index=prompt.index,
        sample_index=key[2],
        token_ids=np.array(live.tokens, np.int32),
        rollout_logprobs=np.array(live.logprobs, np.float32),
        **join_masks(live.masks),
        finish_reason=live.finish_reason,
        weight_version=live.version,
        text=tokenizer.decode(live.tokens, skip_special_tokens=True)
        if tokenizer and finished
        else "",
    )

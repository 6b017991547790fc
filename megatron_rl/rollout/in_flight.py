"""Responses that one set of weights begins and others go on with, on one engine.

A response is generated up to a token of its own, whatever else runs; then its request is paused,
the weights may change, and it goes on. Its keys and values are kept, so that later tokens attend to
what older weights computed; or they are computed anew, by a new request whose prompt is the prompt
and all tokens so far.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_rl.rollout.engine import Part
from megatron_rl.rollout.process_state import preserved_generators
from megatron_rl.rollout.requests import sampling_params
from megatron_rl.rollout.response_gather import Generated
from megatron_rl.rollout.running import (
    GRACE,
    STEPS_BETWEEN_LOOKS,
    any_rank_of_engine,
    ended_without,
)
from megatron_rl.rollout.stopping import StopRule
from megatron_rl.seeds import derive_seed
from megatron_rl.types import FinishReason, Prompt, Response

NO_ROOM = (
    "the engine's cache does not hold all responses that are under way at once, so that some would "
    "lose their keys and values; raise rollout.kv_cache_mib or rollout.memory_fraction, or lower "
    "rollout.prompts"
)
Key = tuple[int, int, int]  # a response by its part's seed, prompt and sample


@dataclass
class Live:
    """One response that vLLM is generating or holds."""

    name: str  # ours
    request: str  # vLLM's
    tokens: list[int]
    logprobs: list[float]
    limit: int  # tokens at which it pauses
    finish_reason: FinishReason = "unfinished"

    def take(self, output: Any) -> None:
        """What one step of the engine has added."""
        completion = output.outputs[0]
        self.tokens += completion.token_ids
        self.logprobs += completion.logprobs.logprobs
        if output.finished:
            self.finish_reason = "stop" if completion.finish_reason == "stop" else "length"

    @property
    def is_done(self) -> bool:
        """Whether it has come as far as it is to come now."""
        return self.finish_reason != "unfinished" or len(self.tokens) >= self.limit


@dataclass
class InFlight:
    """The responses that are under way on this rank's engine; all ranks of it hold the same."""

    core: Any  # vLLM's LLMEngine
    stop: StopRule
    most: int | None = None  # responses that the engine can hold, paused ones too; None: any number
    paused: dict[Key, Live] = field(default_factory=dict)

    def run(
        self,
        asked: Sequence[tuple[Key, Prompt, Response | None, Part]],
        *,
        time_limit: float,
        on_step: Callable[[], object] = lambda: None,
    ) -> dict[Key, Live]:
        """Bring each response to its part's number of tokens, or to its end.

        Paused requests go on; what has none gets one, which computes its keys and values anew.
        Raises TimeoutError on all ranks of the engine; nothing is then under way any more.
        """
        live: dict[Key, Live] = {}
        started = time.monotonic()
        try:
            limit = time_limit + GRACE
            with preserved_generators(), ended_without(limit, limit):
                for key, prompt, begun, part in asked:
                    live[key] = self._go_on(key, prompt, begun, part)
                if self.most is not None and len(live | self.paused) > self.most:
                    raise ValueError(
                        f"{len(live | self.paused)} responses are under way at once on one engine, "
                        f"and rollout.max_sequences={self.most}; raise it, or lower rollout.prompts"
                    )
                left = {one.request: one for one in live.values() if not one.is_done}
                steps = 0
                while left:
                    if steps % STEPS_BETWEEN_LOOKS == 0:
                        (late,) = any_rank_of_engine(time.monotonic() - started > time_limit)
                        if late:
                            raise TimeoutError(
                                f"{len(left)} of {len(asked)} responses did not come as far as "
                                f"they should in {time_limit:g} s; raise the limit"
                            )
                    steps += 1
                    self._step(left)
                    on_step()
        except BaseException:
            self.paused |= live
            self.forget()
            raise
        self.paused |= {key: one for key, one in live.items() if one.finish_reason == "unfinished"}
        return live

    def _go_on(self, key: Key, prompt: Prompt, begun: Response | None, part: Part) -> Live:
        one = self.paused.pop(key, None)
        if one is not None:
            one.limit = part.tokens
            if not one.is_done:
                self._scheduler.running.append(self._scheduler.requests[one.request])
            return one
        tokens = [] if begun is None else begun.token_ids.tolist()
        logprobs = [] if begun is None else begun.rollout_logprobs.tolist()
        sampling = part.sampling
        if tokens:  # a new request draws from its beginning
            seed = derive_seed(sampling.seed, "continued after", len(tokens))
            sampling = replace(sampling, seed=seed, max_tokens=sampling.max_tokens - len(tokens))
        params = sampling_params(
            sampling, prompt=prompt, sample=key[2], stop=self.stop, each_step=True
        )
        name = f"{'-'.join(map(str, key))}-{time.monotonic_ns()}"
        request = self.core.add_request(
            name, {"prompt_token_ids": [*prompt.token_ids, *tokens]}, params
        )
        return Live(name, request, tokens, logprobs, part.tokens)

    def _step(self, left: dict[str, Live]) -> None:
        """One step of the engine; pauses what has come far enough."""
        scheduler = self._scheduler
        before = {name: scheduler.requests[name].num_preemptions for name in left}
        names = {one.name: one for one in left.values()}
        outputs = self.core.step()
        if not outputs and not scheduler.running:
            raise RuntimeError(NO_ROOM)
        for output in outputs:
            one = names[output.request_id]
            one.take(output)
            if one.is_done:
                del left[one.request]
                if one.finish_reason == "unfinished":
                    scheduler.running.remove(scheduler.requests[one.request])
        if any(scheduler.requests[name].num_preemptions > before[name] for name in left):
            raise RuntimeError(NO_ROOM)

    def forget(self) -> None:
        """Let go of all requests: what goes on computes its keys and values anew."""
        self.core.abort_request([one.name for one in self.paused.values()])
        self.paused.clear()

    @property
    def is_running(self) -> bool:
        """Whether a request would take part in the engine's next step."""
        running, waiting = self._scheduler.get_request_counts()
        return running + waiting > 0

    @property
    def _scheduler(self) -> Any:
        return self.core.engine_core.engine_core.scheduler


def asked_of_engine(
    parts: Sequence[Part], *, engine: int, engines: int
) -> list[tuple[int, Key, Prompt, Response | None, Part]]:
    """What one engine does of all parts: the place among all responses, and what `run` takes.

    Prompt i of a part is answered by engine i modulo the number of engines.
    """
    asked, first = [], 0
    for part in parts:
        for place in range(len(part.prompts) * part.samples):
            prompt = place // part.samples
            begun = part.begun[place] if part.begun else None
            finished = begun is not None and begun.finish_reason != "unfinished"
            if prompt % engines == engine and not finished:
                sample = place % part.samples
                key = (part.sampling.seed, part.prompts[prompt].index, sample)
                asked.append((first + place, key, part.prompts[prompt], begun, part))
        first += len(part.prompts) * part.samples
    return asked


def extended(
    parts: Sequence[Part],
    generated: Sequence[Generated],
    *,
    version: int,
) -> list[list[Response]]:
    """The responses of each part with what was generated now, and by which weights."""
    found = {each.place: each for each in generated}
    responses, first = [], 0
    for part in parts:
        count = len(part.prompts) * part.samples
        responses.append(
            [
                part.begun[place]
                if first + place not in found
                else _extend(part, place, found[first + place], version)
                for place in range(count)
            ]
        )
        first += count
    return responses


def _extend(part: Part, place: int, generated: Generated, version: int) -> Response:
    begun = part.begun[place] if part.begun else None
    if begun is None:
        prompt, sample = divmod(place, part.samples)
        begun = Response(
            prompt_index=part.prompts[prompt].index,
            sample_index=sample,
            token_ids=np.empty(0, np.int32),
            rollout_logprobs=np.empty(0, np.float32),
            text="",
            finish_reason="unfinished",
            weight_version=version,
        )
    length = len(begun.token_ids)
    later = begun.later_versions
    if len(generated.token_ids) > length and begun.versions[-1][1] != version:
        later = (*later, (length, version))
    return replace(
        begun,
        token_ids=generated.token_ids,
        rollout_logprobs=generated.logprobs,
        text=generated.text,
        finish_reason=generated.finish_reason,
        later_versions=later,
    )


def as_generated(place: int, live: Live, tokenizer: Any) -> Generated:
    """A response as it goes to all ranks."""
    finished = live.finish_reason != "unfinished"
    return Generated(
        place=place,
        token_ids=np.array(live.tokens, np.int32),
        logprobs=np.array(live.logprobs, np.float32),
        finish_reason=live.finish_reason,
        text=tokenizer.decode(live.tokens, skip_special_tokens=True)
        if tokenizer and finished
        else "",
    )

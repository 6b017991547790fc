"""Requests for vLLM, one per response with its own seed: from prompts to decoded, shared responses.

An engine executes its requests within a time limit. Its result is each response with its position
among all of the call; `data/token_rows.py` shares it with the other ranks.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.agreement import (
    StragglerBarrier,
    raise_across_ranks,
    sum_over_ranks,
)
from megatron_rl.engine.engine import GenerationStopped, OnFinished, ProgressCallback
from megatron_rl.engine.routes import EngineRoutes
from megatron_rl.engine.sampling_masks import EngineSamplingMasks, join_masks
from megatron_rl.engine.starting import preserved_generators
from megatron_rl.engine.stopping import StopCriterion
from megatron_rl.errors import UserError
from megatron_rl.runtime.idle import IdleTime
from megatron_rl.runtime.seeds import derive_seed
from megatron_rl.types import Prompt, Response, SamplingSettings


def gather_seconds(own: float, *, device: torch.device) -> list[float]:
    """Gather every rank's seconds; collective over all processes."""
    seconds = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    seconds[dist.get_rank()] = own
    if dist.get_world_size() > 1:
        dist.all_reduce(seconds)
    return seconds.tolist()


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence for the engine, with its position among all sequences of the call."""

    position: int
    token_ids: Sequence[int]
    params: Any  # vllm.SamplingParams


def check_prompts(prompts: Sequence[Prompt], *, vocab_size: int, longest: int) -> None:
    """Raise ValueError naming the first prompt that is empty, too long or out of vocabulary."""
    for prompt in prompts:
        if not 0 < len(prompt.token_ids) <= longest:
            raise UserError(
                f"prompt {prompt.index} has {len(prompt.token_ids)} tokens; "
                f"the engine takes 1 to {longest} before the response"
            )
        if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= vocab_size:
            raise UserError(f"prompt {prompt.index} has a token outside 0..{vocab_size - 1}")


def sampling_per_prompt(
    sampling: SamplingSettings | Sequence[SamplingSettings], *, count: int
) -> Sequence[SamplingSettings]:
    """Return the sampling settings of each of `count` prompts."""
    return [sampling] * count if isinstance(sampling, SamplingSettings) else sampling


def sampling_requests(
    prompts: Sequence[tuple[int, Prompt, SamplingSettings]], *, samples: int, stop: StopCriterion
) -> list[SequenceRequest]:
    """Build `samples` requests for each numbered prompt, at positions number * samples + i.

    Seeds depend only on the prompt's sampling seed, its index and the sample. Without a seed the
    ranks of one engine would draw from different generators and sample different tokens.
    """
    return [
        SequenceRequest(
            position=number * samples + sample,
            token_ids=prompt.token_ids,
            params=sampling_params(sampling, prompt=prompt, sample=sample, stop=stop),
        )
        for number, prompt, sampling in prompts
        for sample in range(samples)
    ]


def sampling_params(
    sampling: SamplingSettings,
    *,
    prompt: Prompt,
    sample: int,
    stop: StopCriterion,
    each_step: bool = False,
) -> Any:
    """Build vLLM's SamplingParams for one response; each_step: return tokens in every step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        seed=derive_seed(sampling.seed, "response", prompt.index, sample),
        stop_token_ids=list(stop.token_ids),
        stop=list(stop.texts),
        ignore_eos=True,  # only the stop tokens above apply
        logprobs=0,  # only of the sampled token
        flat_logprobs=True,
        detokenize=bool(stop.texts),
        output_kind=RequestOutputKind.DELTA if each_step else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # not shared; vLLM takes as long to copy it as to generate three tokens
    )


def scoring_requests(sequences: Sequence[Sequence[int]]) -> list[SequenceRequest]:
    """Build requests that return the log-probs of the given tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        top_k=1,  # an engine that returns sampling masks takes no temperature of 0
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return [
        SequenceRequest(position=position, token_ids=sequence, params=params)
        for position, sequence in enumerate(sequences)
    ]


def read_scores(outputs: Mapping[int, Any], sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the log-probs of each sequence's tokens from the second on, [length - 1] float32."""
    scores = []
    for index, sequence in enumerate(sequences):
        pairs = zip(outputs[index].prompt_logprobs[1:], sequence[1:], strict=True)
        scores.append(torch.tensor([position[token].logprob for position, token in pairs]))
    return scores


_NO_ROUTES = np.empty(0, np.uint8)


@dataclass
class FinishedResponses:
    """Responses of one `generate` call that this rank decodes and passes on as they finish.

    All ranks of an engine receive the same outputs; each decodes its share of the positions.
    """

    prompts: Sequence[Prompt]
    samples: int  # responses per prompt
    expected: int  # responses of this engine
    longest: int  # tokens of a response at most; 0: unknown
    core: Any  # vLLM's LLMEngine
    share: tuple[int, int]  # rank within the engine, number of its ranks
    tokenizer: Any
    weight_version: int
    on_progress: ProgressCallback | None = None
    on_response: OnFinished | None = None
    routes: EngineRoutes | None = None
    masks: EngineSamplingMasks | None = None
    own: dict[int, Response] = field(default_factory=dict)  # by position
    _num_finished: int = 0
    _finished_tokens: int = 0
    _running_tokens: int = 0
    _counted: float = -math.inf  # when they were counted

    def __post_init__(self) -> None:
        if self.routes is not None:
            self.routes.clear()

    def add(self, position: int, output: Any) -> None:
        """Add vLLM's output of the request at `position`."""
        tokens = len(output.outputs[0].token_ids)
        self._keep(position, lambda: self._response(position, output), tokens)

    def keep(self, position: int, response: Response) -> None:
        """Add a response that is complete."""
        self._keep(position, lambda: response, len(response.token_ids))

    def show(self) -> None:
        """Report progress, with the tokens of unfinished requests as they were within a second.

        Until a quarter of the requests is finished, unfinished requests are expected to reach the
        maximum length, because short responses end first.
        """
        if self.on_progress is None:
            return
        if (now := time.monotonic()) - self._counted > COUNT_SECONDS:
            self._counted, self._running_tokens = now, count_running_tokens(self.core)
        done, tokens = self._num_finished, self._finished_tokens
        each = self.longest if 4 * done < self.expected else tokens / done
        expected = int(tokens + (self.expected - done) * each) if self.longest else 0
        self.on_progress(done, self.expected, tokens + self._running_tokens, expected)

    def _keep(self, position: int, build: Callable[[], Response], tokens: int) -> None:
        self._num_finished += 1
        self._finished_tokens += tokens
        self.show()
        rank, ranks = self.share
        if position % ranks == rank:
            self.own[position] = build()
            if self.on_response is not None:
                self.on_response(position, self.own[position])

    def _response(self, position: int, output: Any) -> Response:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        prompt, sample = divmod(position, self.samples)
        decode = self.tokenizer.decode if self.tokenizer else None
        return Response(
            prompt_index=self.prompts[prompt].index,
            sample_index=sample,
            token_ids=np.array(tokens, np.int32),
            rollout_logprobs=np.array(completion.logprobs.logprobs, np.float32),
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
            text=decode(tokens, skip_special_tokens=True) if decode else "",
            weight_version=self.weight_version,
            **join_masks([] if self.masks is None else [self.masks.of(output)]),
            routes=_NO_ROUTES if self.routes is None else self.routes.of(output),
        )


COUNT_SECONDS = 1.0  # between counts of the tokens of unfinished requests
Finished = Callable[[int, Any], None]  # position of a request, vLLM's RequestOutput
CLEAN_UP_SECONDS = 30.0  # seconds beyond the limit for the current step and for cleaning up
POLL_INTERVAL_STEPS = 8  # between checks of the limits on all ranks of an engine


class FurtherRequests(Protocol):
    """Requests that follow from finished ones; the same on every rank of an engine."""

    failure: Exception | None  # of this rank
    answered: int  # how often something arrived that was waited for

    @property
    def is_waiting(self) -> bool:
        """True while further requests may come although none runs."""
        ...

    def next_requests(self, *, wait: bool) -> list[SequenceRequest]:
        """Return the requests that can start; wait: for a moment, since none runs. Collective."""
        ...


def run_requests(
    core: Any,
    requests: Sequence[SequenceRequest],
    *,
    stall_limit: float,
    on_finished: Finished,
    on_step: Callable[[], object] = lambda: None,
    on_running: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
    further: FurtherRequests | None = None,
    lora_request: Any = None,
) -> None:
    """Run all requests and call `on_finished(position, vLLM's RequestOutput)` as each finishes.

    core: vLLM's LLMEngine. All ranks of an engine call this with the same requests.
    on_running: called every few steps.
    further: a source of requests that start between steps, until it waits for nothing.
    lora_request: vLLM's LoRARequest of the adapters that all requests use; None: of none.
    All ranks of the engine raise together, which leaves it idle: TimeoutError after `stall_limit`
    seconds without a finished request or an answer; the error of `on_finished` if it raised
    (RuntimeError on the other ranks); GenerationStopped if `should_stop` returned true on any rank.
    If a step does not return, because another rank of the engine hangs or died, the process exits
    with a message: vLLM waits in a loop that cannot be interrupted.
    """
    limits = StallLimit(stall_limit)
    running: dict[str, int] = {}  # positions of requests, by their names in vLLM
    add = partial(_add, core, running, lora_request=lora_request)
    try:
        with preserved_generators(), limits.hard_timeout() as made_progress:
            add(requests)
            finished, steps, failure = 0, 0, None
            while running or (further is not None and further.is_waiting):
                if not running or steps % POLL_INTERVAL_STEPS == 0:
                    failure = failure or (further.failure if further is not None else None)
                    limits.check(failure, should_stop(), finished, finished + len(running))
                    on_running()
                steps += 1
                on_step()
                if further is not None and further.is_waiting:
                    answered = further.answered
                    add(further.next_requests(wait=not running))
                    made_progress()  # the ranks of the engine took part
                    if further.answered > answered:
                        limits.made_progress()
                for output in core.step() if running else ():
                    if output.finished:
                        finished += 1
                        limits.made_progress()
                        made_progress()
                        position = running.pop(output.request_id)
                        failure = failure or _error_of(on_finished, position, output)
            failure = failure or (further.failure if further is not None else None)
            if failure is not None:
                raise failure
    except BaseException:
        # Requests left in the queue would come back as results of the next call.
        core.abort_request(list(running))
        raise


def count_running_tokens(core: Any) -> int:
    """Count the tokens that unfinished requests have generated."""
    states = core.output_processor.request_states.values()
    return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer)


def _add(
    core: Any, running: dict[str, int], new: Sequence[SequenceRequest], *, lora_request: Any
) -> None:
    for request in new:
        name = f"{time.monotonic_ns()}-{request.position}"
        running[name] = request.position
        tokens = {"prompt_token_ids": list(request.token_ids)}
        core.add_request(name, tokens, request.params, lora_request=lora_request)


def run_on_every_rank(
    run: Callable[[], dict[int, Response]],
    *,
    work: StragglerBarrier,
    on_step: Callable[[], object],
    doing: str,
) -> tuple[dict[int, Response], float]:
    """Return the results of `run` on this rank, and its seconds; collective over all processes.

    Raises an error of one rank on every rank, and GenerationStopped if any raised it.
    """
    own, error = dict[int, Response](), None
    work.begin()
    start = time.perf_counter()
    try:
        own = run()
    except Exception as caught:  # noqa: BLE001 - other ranks must not wait, whatever it is
        error = caught
    seconds = time.perf_counter() - start
    work.finish(while_waiting=on_step)
    stopped = isinstance(error, GenerationStopped)
    raise_across_ranks(None if stopped else error, doing=doing)
    if sum_over_ranks(int(stopped), doing=doing):
        raise GenerationStopped
    return own, seconds


class StallLimit:
    """Seconds without progress of one call, checked by all ranks of an engine together."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._idle = IdleTime(seconds)

    def made_progress(self) -> None:
        self._idle.restart()

    def hard_timeout(self) -> AbstractContextManager[Callable[[], None]]:
        return hard_timeout(self.seconds + CLEAN_UP_SECONDS)

    def check(
        self, failure: Exception | None, should_stop: bool, finished: int, total: int
    ) -> None:
        """Raise if the limit is exceeded, or if any rank of the engine failed or has to stop."""
        is_late = self._idle.is_over()
        stalled, failed, stopped = any_rank_of_engine(is_late, failure is not None, should_stop)
        if failed:
            raise failure or RuntimeError("another rank of this engine failed")
        if stopped:
            raise GenerationStopped
        if stalled:
            raise TimeoutError(
                f"{finished} of {total} responses were finished and none in the last "
                f"{self.seconds:g} s: the engine hangs, or its responses take longer than "
                "rollout.stall_seconds allows"
            )


def _error_of(on_finished: Finished, position: int, output: Any) -> Exception | None:
    """Return what `on_finished` raised; raised later, since the other ranks continue to step."""
    try:
        on_finished(position, output)
    except Exception as error:  # noqa: BLE001 - all ranks of the engine raise after one step
        return error
    return None


def any_rank_of_engine(*reasons: bool) -> tuple[bool, ...]:
    """Combine the reasons to stop of this engine's ranks: all must stop after the same step."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return reasons
    combined = torch.tensor([int(reason) for reason in reasons])
    dist.all_reduce(combined, dist.ReduceOp.MAX, group=group.cpu_group)
    return tuple(bool(value) for value in combined)


def tensor_group() -> Any:
    """Return the group of this engine's ranks on the host; None for one rank."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return None if group.world_size == 1 else group.cpu_group


@contextmanager
def hard_timeout(idle: float) -> Iterator[Callable[[], None]]:
    """Exit this process after `idle` seconds in the block without progress.

    Yields a function to call on progress. Needed for an engine step that does not return, which no
    Python exception can interrupt.
    """
    time_left = IdleTime(idle)
    is_finished = threading.Event()

    def watch() -> None:
        while not is_finished.wait(min(1.0, idle / 10)):
            if time_left.is_over():
                sys.stderr.write(
                    f"megatron-rl: rank {dist.get_rank()}: an engine step did not return, "
                    f"and no response finished for {idle:.0f} s: the engine hangs, or "
                    "another of its ranks hangs or died\n"
                )
                sys.stderr.flush()
                os._exit(1)

    threading.Thread(target=watch, name="engine watch", daemon=True).start()
    try:
        yield time_left.restart
    finally:
        is_finished.set()

"""Execution of requests on one engine, within a time limit."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_rl.distributed.agreement import StragglerBarrier, raise_across_ranks, sum_over_ranks
from megatron_rl.engine.engine import GenerationStopped
from megatron_rl.engine.requests import SequenceRequest
from megatron_rl.engine.response_gather import Generated
from megatron_rl.engine.starting import preserved_generators

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
    time_limit: float,
    stall_limit: float,
    on_finished: Finished,
    on_step: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
    further: FurtherRequests | None = None,
    lora_request: Any = None,
) -> None:
    """Run all requests and call `on_finished(position, vLLM's RequestOutput)` as each finishes.

    core: vLLM's LLMEngine. All ranks of an engine call this with the same requests.
    further: a source of requests that start between steps, until it waits for nothing.
    lora_request: vLLM's LoRARequest of the adapters that all requests use; None: of none.
    All ranks of the engine raise together, which leaves it idle: TimeoutError after `time_limit`
    seconds or after `stall_limit` seconds without a finished request or an answer; the error of
    `on_finished` if it raised (RuntimeError on the other ranks); GenerationStopped if `should_stop`
    returned true on any rank. If a step does not return, because another rank of the engine hangs
    or died, the process exits with a message: vLLM waits in a loop that cannot be interrupted.
    """
    limits = _Limits(time_limit, stall_limit)
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


def _add(
    core: Any, running: dict[str, int], new: Sequence[SequenceRequest], *, lora_request: Any
) -> None:
    for request in new:
        name = f"{time.monotonic_ns()}-{request.position}"
        running[name] = request.position
        tokens = {"prompt_token_ids": list(request.token_ids)}
        core.add_request(name, tokens, request.params, lora_request=lora_request)


def run_on_every_rank(
    run: Callable[[], list[Generated]],
    *,
    work: StragglerBarrier,
    on_step: Callable[[], object],
    doing: str,
) -> tuple[list[Generated], float]:
    """Return the results of `run` on this rank, and its seconds; collective over all processes.

    Raises an error of one rank on every rank, and GenerationStopped if any raised it.
    """
    own, error = list[Generated](), None
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


class _Limits:
    """Time limits of one call, checked by all ranks of an engine together."""

    def __init__(self, total: float, stall: float) -> None:
        self.total, self.stall = total, stall
        self.started = self.last_progress = time.monotonic()

    def made_progress(self) -> None:
        self.last_progress = time.monotonic()

    def hard_timeout(self) -> AbstractContextManager[Callable[[], None]]:
        return hard_timeout(self.total + CLEAN_UP_SECONDS, self.stall + CLEAN_UP_SECONDS)

    def check(
        self, failure: Exception | None, should_stop: bool, finished: int, total: int
    ) -> None:
        """Raise if a limit is exceeded, or if any rank of the engine failed or has to stop."""
        now = time.monotonic()
        late, stalled, failed, stopped = any_rank_of_engine(
            now - self.started > self.total, now - self.last_progress > self.stall,
            failure is not None, should_stop,
        )  # fmt: skip
        if failed:
            raise failure or RuntimeError("another rank of this engine failed")
        if stopped:
            raise GenerationStopped
        if late or stalled:
            limit = self.total if late else self.stall
            count = f"{finished} of {total} responses were finished"
            raise TimeoutError(f"{count} {_limit_message(limit, late=late)}")


def _limit_message(limit: float, *, late: bool) -> str:
    if late:
        return f"after {limit:g} s; generate fewer or shorter ones, or raise the limit"
    return (
        f"and none in the last {limit:g} s: the engine hangs, or its responses take longer than "
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
def hard_timeout(total: float, idle: float) -> Iterator[Callable[[], None]]:
    """Exit this process after `total` seconds in the block, or `idle` seconds without progress.

    Yields a function to call on progress. Needed for an engine step that does not return, which no
    Python exception can interrupt.
    """
    since = time.monotonic()
    is_finished = threading.Event()

    def finished_one() -> None:
        nonlocal since
        since = time.monotonic()

    def watch() -> None:
        start = since
        while not is_finished.wait(min(1.0, idle / 10)):
            now = time.monotonic()
            if now - start > total or now - since > idle:
                sys.stderr.write(
                    f"megatron-rl: rank {dist.get_rank()}: an engine step did not return, "
                    f"and no response finished for {now - since:.0f} s: the engine hangs, or "
                    "another of its ranks hangs or died\n"
                )
                sys.stderr.flush()
                os._exit(1)

    threading.Thread(target=watch, name="engine watch", daemon=True).start()
    try:
        yield finished_one
    finally:
        is_finished.set()

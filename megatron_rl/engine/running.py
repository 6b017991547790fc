"""Execution of requests on one engine, within a time limit."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.engine.engine import GenerationStopped
from megatron_rl.engine.process_state import preserved_generators
from megatron_rl.engine.requests import SequenceRequest

Finished = Callable[[int, Any], None]  # position of a request, vLLM's RequestOutput
GRACE = 30.0  # seconds beyond the limit for the current step and for cleaning up
POLL_INTERVAL_STEPS = 8  # between checks of the limits on all ranks of an engine


def run_requests(
    core: Any,
    requests: Sequence[SequenceRequest],
    *,
    time_limit: float,
    stall_limit: float,
    on_finished: Finished,
    on_step: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run all requests and call `on_finished(position, vLLM's RequestOutput)` as each finishes.

    core: vLLM's LLMEngine. All ranks of an engine call this with the same requests.
    All ranks of the engine raise together, which leaves it idle: TimeoutError after `time_limit`
    seconds or after `stall_limit` seconds without a finished response; the error of `on_finished`
    if it raised (RuntimeError on the other ranks); GenerationStopped if `should_stop` returned
    true on any rank. If a step does not return, because another rank of the engine hangs or died,
    the process exits with a message: vLLM waits in a loop that cannot be interrupted.
    """
    finished: set[int] = set()
    started = last_finished = time.monotonic()
    names = {f"{time.monotonic_ns()}-{request.position}": request.position for request in requests}
    try:
        limits = (time_limit + GRACE, stall_limit + GRACE)
        with preserved_generators(), hard_timeout(*limits) as finished_one:
            for name, request in zip(names, requests, strict=True):
                prompt = {"prompt_token_ids": list(request.token_ids)}
                core.add_request(name, prompt, request.params)
            steps, failure = 0, None
            while len(finished) < len(requests):
                if steps % POLL_INTERVAL_STEPS == 0:
                    now = time.monotonic()
                    late, stalled, failed, stopped = any_rank_of_engine(
                        now - started > time_limit, now - last_finished > stall_limit,
                        failure is not None, should_stop(),
                    )  # fmt: skip
                    if failed:
                        raise failure or RuntimeError("another rank of this engine failed")
                    if stopped:
                        raise GenerationStopped
                    if late or stalled:
                        count = f"{len(finished)} of {len(requests)} responses were finished"
                        limit = time_limit if late else stall_limit
                        raise TimeoutError(f"{count} {_limit_message(limit, late=late)}")
                steps += 1
                on_step()
                for output in core.step():
                    if output.finished:
                        position = names[output.request_id]
                        finished.add(position)
                        last_finished = time.monotonic()
                        finished_one()
                        failure = failure or _error_of(on_finished, position, output)
            if failure is not None:
                raise failure
    except BaseException:
        # Requests left in the queue would come back as results of the next call.
        core.abort_request([name for name, position in names.items() if position not in finished])
        raise


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

"""Running requests on one engine to their end, within a time limit."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.rollout.engine import GenerationStopped
from megatron_rl.rollout.process_state import preserved_generators
from megatron_rl.rollout.requests import SequenceRequest

GRACE = 30.0  # seconds beyond the limit for the step under way and for clearing up
STEPS_BETWEEN_LOOKS = 8  # at the clock, which all ranks of an engine read together


def run_requests(
    core: Any,
    requests: Sequence[SequenceRequest],
    *,
    time_limit: float,
    stall_limit: float,
    on_finished: Callable[[int, Any], None],
    on_step: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run requests to their end; calls `on_finished(place, vLLM's RequestOutput)` as each ends.

    core: vLLM's LLMEngine. All ranks of an engine call this with the same requests.
    Raises TimeoutError on all of them after `time_limit` seconds, or after `stall_limit` seconds in
    which no response ended, and on all of them where `on_finished` of one raised, its own error
    there, and GenerationStopped where `should_stop` of one says so; the engine is then idle again.
    A rank whose engine does not come back from a step, because another rank of it hangs or died,
    ends its process with a message: vLLM waits in a loop that nothing can interrupt.
    """
    finished: set[int] = set()
    started = last = time.monotonic()
    names = {f"{time.monotonic_ns()}-{request.place}": request.place for request in requests}
    try:
        limits = (time_limit + GRACE, stall_limit + GRACE)
        with preserved_generators(), ended_without(*limits) as ended:
            for name, request in zip(names, requests, strict=True):
                prompt = {"prompt_token_ids": list(request.token_ids)}
                core.add_request(name, prompt, request.params)
            steps, failure = 0, None
            while len(finished) < len(requests):
                if steps % STEPS_BETWEEN_LOOKS == 0:
                    now = time.monotonic()
                    late, stalled, failed, stopped = any_rank_of_engine(
                        now - started > time_limit, now - last > stall_limit,
                        failure is not None, should_stop(),
                    )  # fmt: skip
                    if failed:
                        raise failure or RuntimeError("another rank of this engine failed")
                    if stopped:
                        raise GenerationStopped
                    if late or stalled:
                        count = f"{len(finished)} of {len(requests)} responses were finished"
                        limit = time_limit if late else stall_limit
                        raise TimeoutError(f"{count} {_why(limit, late=late)}")
                steps += 1
                on_step()
                for output in core.step():
                    if output.finished:
                        place = names[output.request_id]
                        finished.add(place)
                        last = time.monotonic()
                        ended()
                        failure = failure or _error_of(on_finished, place, output)
            if failure is not None:
                raise failure
    except BaseException:
        # Requests left in the queue would come back as results of the next call.
        core.abort_request([name for name, place in names.items() if place not in finished])
        raise


def _why(limit: float, *, late: bool) -> str:
    if late:
        return f"after {limit:g} s; generate fewer or shorter ones, or raise the limit"
    return (
        f"and none in the last {limit:g} s: the engine hangs, or its responses take longer than "
        "rollout.stall_seconds allows"
    )


def _error_of(on_finished: Callable[[int, Any], None], place: int, output: Any) -> Exception | None:
    """What taking an output raised: raised later, since the engine's other ranks step on."""
    try:
        on_finished(place, output)
    except Exception as error:  # noqa: BLE001 - raised by all ranks of the engine after one step
        return error
    return None


def any_rank_of_engine(*reasons: bool) -> tuple[bool, ...]:
    """Which reasons to stop any rank of this engine has: all must stop after the same step."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return reasons
    answer = torch.tensor([int(reason) for reason in reasons])
    dist.all_reduce(answer, dist.ReduceOp.MAX, group=group.cpu_group)
    return tuple(bool(each) for each in answer)


@contextmanager
def ended_without(in_all: float, at_once: float) -> Iterator[Callable[[], None]]:
    """End this process when the block takes longer, or when what it gives is not called for long.

    For an engine that does not come back from a step; no Python may run until then.
    """
    since = time.monotonic()
    is_over = threading.Event()

    def ended() -> None:
        nonlocal since
        since = time.monotonic()

    def watch() -> None:
        began = since
        while not is_over.wait(min(1.0, at_once / 10)):
            now = time.monotonic()
            if now - began > in_all or now - since > at_once:
                sys.stderr.write(
                    f"megatron-rl: rank {dist.get_rank()}: the engine did not come back from a "
                    f"step, no response ended for {now - since:.0f} s: it hangs, or another rank "
                    "of it hangs or died\n"
                )
                sys.stderr.flush()
                os._exit(1)

    threading.Thread(target=watch, name="engine watch", daemon=True).start()
    try:
        yield ended
    finally:
        is_over.set()

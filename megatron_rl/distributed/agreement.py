"""Error synchronization: every rank raises, so that none waits for a rank that has failed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.runtime.cores import machine, own_cores, share_of_cores
from megatron_rl.runtime.failures import OtherRankError, RankTimeoutError

T = TypeVar("T")


def wire_device() -> torch.device:
    """Return the device on which the default process group exchanges small tensors."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def raise_across_ranks(
    error: Exception | None, *, doing: str, time_limit: float | None = None
) -> None:
    """Raise on every rank if any rank has an `error`; collective over all processes.

    A rank with an error raises that error; the others raise an OtherRankError that lists the
    failed ranks and their errors. All messages begin with `doing`. Without errors the ranks
    exchange a single integer.
    time_limit: seconds to wait for the other ranks before raising RankTimeoutError; None: the
        process group's own timeout.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise _prefixed(error, doing)
        return
    if not sum_over_ranks(int(error is not None), doing=doing, time_limit=time_limit):
        return
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise _prefixed(error, doing)
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None]
    raise OtherRankError(f"{doing}: " + "; ".join(lines))


@contextmanager
def sync_errors_across_ranks(*, doing: str) -> Iterator[None]:
    """Raise an error from any rank's block on every rank; collective over all processes.

    The block must not communicate: a rank that fails inside it would miss a collective.
    """
    error = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised again on the next line
        error = caught
    raise_across_ranks(error, doing=doing)


def run_on_rank_0(action: Callable[[], T], *, doing: str) -> T:
    """Run `action` on rank 0 and return its result on every rank; collective over all processes.

    A ValueError from `action` is about the user's input; every rank raises the same one.
    """
    box: list[Any] = [None, None]  # result, error
    with sync_errors_across_ranks(doing=doing):
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                box[0] = action()
            except ValueError as error:
                box[1] = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(box, device=wire_device())
    if box[1] is not None:
        raise box[1]
    return box[0]


def sum_over_ranks(number: int, *, doing: str, time_limit: float | None = None) -> int:
    """Return the sum of `number` over all ranks; collective.

    Raises RankTimeoutError if another rank dies or does not join within `time_limit` seconds.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    total = torch.tensor([number], device=wire_device())
    start = time.monotonic()
    try:
        work = dist.all_reduce(total, async_op=True)
        if time_limit is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=time_limit))
    except RuntimeError as error:
        waited = time.monotonic() - start
        is_late = time_limit is not None and waited > 0.9 * time_limit
        reason = f"did not join within {time_limit:g} s" if is_late else "exited"
        raise RankTimeoutError(f"{doing}: another rank {reason} (waited {waited:.0f} s)") from error
    return int(total)


def _prefixed(error: Exception, doing: str) -> Exception:
    """Return the error with `doing` before its message, or as a note if it has no message."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{doing}: {error.args[0]}",)
    else:
        error.add_note(doing)
    return error


def gather_from_ranks(value: Any) -> list[Any]:
    """Return every rank's value in rank order; for small values. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def cores_of_rank() -> int:
    """Return the CPU cores of this rank, its part of those that it shares. Collective."""
    own, here = own_cores(), machine()
    of_all = gather_from_ranks((here, sorted(own)))
    return share_of_cores(own, [cores for where, cores in of_all if where == here])

"""Errors that every rank raises together, so that none waits for one that has given up."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class RankTimeoutError(RuntimeError):
    """Another rank did not come in time, or died: no collective can follow."""


def wire_device() -> torch.device:
    """Where small tensors must lie for the default process group's collectives."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def raise_together(error: Exception | None, *, doing: str, time_limit: float | None = None) -> None:
    """Collective over all processes: raise everywhere if any rank has an `error`.

    A rank with an error raises that error, the others a RuntimeError that names the ranks and
    their errors; all messages begin with `doing`. One integer is exchanged where all is well.
    time_limit: seconds to wait for the others, else RankTimeoutError; None: as the process
        group has it.
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
    told = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None]
    raise RuntimeError(f"{doing}: " + "; ".join(told))


@contextmanager
def raised_together(*, doing: str) -> Iterator[None]:
    """Collective over all processes: an error of any rank's block is raised on every rank.

    The block itself must not communicate: a rank that fails in it would miss a collective.
    """
    error = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised again on the next line
        error = caught
    raise_together(error, doing=doing)


def run_on_rank_0(action: Callable[[], T], *, doing: str) -> T:
    """Collective over all processes: rank 0's result of `action` on every rank.

    A ValueError of it, which is about what the user gave, is the same on every rank.
    """
    box: list[Any] = [None, None]  # result, error
    with raised_together(doing=doing):
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
    """The sum of every rank's number; RankTimeoutError where another rank dies or does not come."""
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
        limit = "" if time_limit is None else f" (the limit is {time_limit:g} s)"
        raise RankTimeoutError(
            f"{doing}: another rank died or did not come: gave up after "
            f"{time.monotonic() - start:.0f} s{limit}: {error}"
        ) from error
    return int(total)


def _prefixed(error: Exception, doing: str) -> Exception:
    """The same error, its message saying what was attempted (in a note where it has no message)."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{doing}: {error.args[0]}",)
    else:
        error.add_note(doing)
    return error


def gather_from_ranks(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks; for small values. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

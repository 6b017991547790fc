"""Error synchronization: every rank raises, so that none waits for a rank that has failed.

A collective times out after minutes. At a `StragglerBarrier` a rank may be an hour late (as the
engine with the longest response may be), provided that some rank makes progress.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.distributed.link import Link
from megatron_rl.runtime.failures import OtherRankError, RankTimeoutError
from megatron_rl.runtime.idle import IdleTime
from megatron_rl.runtime.joining import machine, own_cores, share_of_cores

T = TypeVar("T")


def wire_device() -> torch.device:
    """Return the device on which the default process group exchanges small tensors."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def raise_across_ranks(
    error: Exception | None,
    *,
    doing: str,
    time_limit: float | None = None,
    link: Link | None = None,
) -> None:
    """Raise on every rank if any rank has an `error`; collective over all processes.

    A rank with an error raises that error; the others raise an OtherRankError that lists the
    failed ranks and their errors. All messages begin with `doing`. Without errors the ranks
    exchange a single integer.
    time_limit: seconds to wait for the other ranks before raising RankTimeoutError; None: the
        process group's own timeout.
    link: over all ranks of both its sides; None: of the default process group.
    """
    failed = int(error is not None)
    if not sum_over_ranks(failed, doing=doing, time_limit=time_limit, link=link):
        return
    own = None if error is None else f"{type(error).__name__}: {error}"
    messages = gather_from_ranks(own, link=link)
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

    A ValueError from `action` is about the user's input; every rank raises the same error.
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


def sum_over_ranks(
    number: int, *, doing: str, time_limit: float | None = None, link: Link | None = None
) -> int:
    """Return the sum of `number` over all ranks, of both sides of a link; collective.

    Raises RankTimeoutError if another rank dies, or naming those that do not join within
    `time_limit` seconds, as far as the store knows them.
    """
    if link is None and (not dist.is_initialized() or dist.get_world_size() == 1):
        return number
    total = torch.tensor([number], device=wire_device() if link is None else "cpu")
    start = time.monotonic()
    joining = None if time_limit is None else _Joining.of(link)
    try:
        if joining is not None:
            joining.record()
        work = (
            dist.all_reduce(total, async_op=True)
            if link is None
            else link.weights.all_reduce(total)
        )
        if time_limit is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=time_limit))
    except RuntimeError as error:
        waited = time.monotonic() - start
        reason = "another rank exited"
        if time_limit is not None and joining is not None and waited > 0.9 * time_limit:
            reason = f"{joining.describe_missing()} within {time_limit:g} s"
        raise RankTimeoutError(f"{doing}: {reason} (waited {waited:.0f} s)") from error
    return int(total)


_STORE_SECONDS = 5.0  # that the store has to tell who is missing
_NAMED_RANKS = 8  # most missing ranks that an error lists
_joined: Counter[bool] = Counter()  # calls with a time limit, of the default group and of a link


@dataclass(frozen=True)
class _Joining:
    """This rank's entry into a sum with a time limit, of which the store has every rank's last."""

    store: dist.Store
    rank: int
    size: int
    number: int

    @classmethod
    def of(cls, link: Link | None) -> Self:
        _joined[link is None] += 1
        number = _joined[link is None]
        if link is not None:
            store = dist.PrefixStore("joined", link.store)
            return cls(store, link.rank, link.trainers + link.engines, number)
        store = dist.PrefixStore("joined", dist.distributed_c10d._get_default_store())
        return cls(store, dist.get_rank(), dist.get_world_size(), number)

    def record(self) -> None:
        self.store.set(f"{self.rank}", f"{self.number}")

    def describe_missing(self) -> str:
        """Return who did not join, as far as the store knows."""
        found: list[list[int] | None] = []
        # A store whose process is stopped never answers, and a thread can be left behind.
        reader = threading.Thread(target=lambda: found.append(self._missing()), daemon=True)
        reader.start()
        reader.join(_STORE_SECONDS)
        missing = found[0] if found else [0]
        is_in_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if missing is None or not (found or is_in_rank_0):
            return "another rank did not join"
        if not missing:
            return "every rank joined, but one did not finish"
        more = ", ..." if missing[_NAMED_RANKS:] else ""
        names = ", ".join(map(str, missing[:_NAMED_RANKS])) + more
        return f"rank{'s' if missing[1:] else ''} {names} did not join"

    def _missing(self) -> list[int] | None:
        """Return the ranks that are behind this one; None if the store is gone."""
        try:
            last = [
                int(self.store.get(f"{rank}")) if self.store.check([f"{rank}"]) else 0
                for rank in range(self.size)
            ]
        except RuntimeError:  # another rank has given up, too, and rank 0 has left
            return None
        return [rank for rank, number in enumerate(last) if number < self.number]


def _prefixed(error: Exception, doing: str) -> Exception:
    """Return the error with `doing` before its message, or as a note if it has no message."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{doing}: {error.args[0]}",)
    else:
        error.add_note(doing)
    return error


def gather_from_ranks(value: Any, *, link: Link | None = None) -> list[Any]:
    """Return every rank's value in rank order, with a link of both its sides. Collective.

    For small values.
    """
    if link is not None:
        return link.weights.gather(value)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def cores_of_rank() -> int:
    """Return the number of CPU cores of this rank, counting its part of shared cores.
    Collective."""
    own, here = own_cores(), machine()
    of_all = gather_from_ranks((here, sorted(own)))
    return share_of_cores(own, [cores for where, cores in of_all if where == here])


_REPORT_INTERVAL = 1.0  # seconds
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.5  # seconds between two polls of the store


class StragglerBarrier:
    """Barrier for one kind of work, used once per round by every rank through torch's store.

    name: unique within a run. patience: seconds without progress on any rank before it fails.
    """

    def __init__(self, name: str, *, patience: float) -> None:
        self.name, self.patience = name, patience
        self._rounds = 0
        self._last_report = (0.0, 0)  # (time, amount done)
        self._store: dist.Store | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            # The store used for rendezvous; torch has no public function that returns it.
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"straggler barrier/{name}", store)

    def begin(self) -> None:
        """Start a new round."""
        self._rounds += 1
        self._last_report = (time.monotonic(), 0)

    def advance(self, done: int, total: int | None = None) -> None:
        """Report this rank's progress to the other ranks, at most once per second."""
        reported_at, reported = self._last_report
        if self._store is None or time.monotonic() - reported_at < _REPORT_INTERVAL:
            return
        self._store.set(f"rank {dist.get_rank()}", f"{self._rounds} {done} of {total or 'all'}")
        self._store.add("all", done - reported)
        self._last_report = (time.monotonic(), done)

    def with_progress(self, on_progress: Callable[..., None] | None) -> Callable[..., None]:
        """Return a callback that calls `advance`, then `on_progress` with all its arguments."""

        def report(done: int, total: int, *further: int) -> None:
            self.advance(done, total)
            if on_progress is not None:
                on_progress(done, total, *further)

        return report

    def finish(self, *, while_waiting: Callable[[], object] = lambda: None) -> None:
        """Wait until every rank has finished or failed. Collective.

        while_waiting: called at least twice per second.
        Raises RankTimeoutError with the unfinished ranks if no rank makes progress, or if the
        store, which runs in rank 0, does not respond.
        """
        if self._store is None:
            return
        own = f"rank {dist.get_rank()}"
        try:
            self._store.set(own, f"{self._rounds} done")
            self._wait(self._store, while_waiting)
        except RankTimeoutError:
            raise
        except RuntimeError as error:  # includes torch's DistNetworkError and DistStoreError
            raise RankTimeoutError(
                f"{self.name}: {own} has finished, but rank 0 does not respond: {error}"
            ) from error

    def _wait(self, store: dist.Store, while_waiting: Callable[[], object]) -> None:
        goal = self._rounds * dist.get_world_size()
        finished, pause = store.add("done", 1), _SHORTEST_PAUSE
        idle = IdleTime(self.patience, clock=time.monotonic)
        progress = store.add("all", 0)
        while finished < goal:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            current = store.add("done", 0), store.add("all", 0)
            while_waiting()
            if current != (finished, progress):
                finished, progress = current
                idle.restart()
            elif idle.is_over():
                raise RankTimeoutError(
                    f"{self.name}: no rank made progress for {self.patience:g} s; waiting for "
                    + self._describe_unfinished(store)
                )

    def _describe_unfinished(self, store: dist.Store) -> str:
        """List the unfinished ranks with their last reported progress."""
        messages = []
        for rank in range(dist.get_world_size()):
            key = f"rank {rank}"
            status = store.get(key).decode() if store.check([key]) else "0 "
            number, _, progress = status.partition(" ")
            if int(number) < self._rounds:
                messages.append(f"{key}, which has done nothing yet")
            elif progress != "done":
                messages.append(f"{key}, which has done {progress}")
        return "; ".join(messages)

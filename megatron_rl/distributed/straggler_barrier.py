"""Barrier for work that takes ranks very different times.

A collective times out after minutes. At this barrier a rank may be an hour late (as the engine with
the longest response may be), provided that some rank makes progress.
"""

import time
from collections.abc import Callable

import torch.distributed as dist

from megatron_rl.runtime.failures import RankTimeoutError

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

    def with_progress(
        self, on_progress: Callable[[int, int], None] | None
    ) -> Callable[[int, int], None]:
        """Return a callback that calls `advance`, then `on_progress`."""

        def report(done: int, total: int) -> None:
            self.advance(done, total)
            if on_progress is not None:
                on_progress(done, total)

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
        finished, since, pause = store.add("done", 1), time.monotonic(), _SHORTEST_PAUSE
        progress = store.add("all", 0)
        while finished < goal:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            current = store.add("done", 0), store.add("all", 0)
            while_waiting()
            if current != (finished, progress):
                (finished, progress), since = current, time.monotonic()
            elif time.monotonic() - since > self.patience:
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

"""Work of which ranks have very different amounts: those that are done wait for the others.

A collective waits minutes at most, for a rank that should be there. Here a rank may be an hour
late, as the engine with the longest response is, as long as any rank gets further.
"""

import time
from collections.abc import Callable

import torch.distributed as dist

from megatron_rl.distributed.agreement import RankTimeoutError

_TOLD_EVERY = 1.0  # seconds
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.5  # seconds between two looks at the others


class UnequalWork:
    """One kind of such work, done again and again; every rank holds one. Talks by torch's store.

    name: no two alike in a run. patience: seconds in which no rank gets further.
    """

    def __init__(self, name: str, *, patience: float) -> None:
        self.name, self.patience = name, patience
        self._rounds = 0
        self._told = (0.0, 0)  # when, and how much was done then
        self._store: dist.Store | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            # The store that the ranks have met at; torch has no public name for it.
            store = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"unequal work/{name}", store)

    def begin(self) -> None:
        """A new round: nothing is done yet."""
        self._rounds += 1
        self._told = (time.monotonic(), 0)

    def advance(self, done: int, total: int | None = None) -> None:
        """This rank has done so much; others hear of it, once a second at most."""
        when, told = self._told
        if self._store is None or time.monotonic() - when < _TOLD_EVERY:
            return
        self._store.set(f"rank {dist.get_rank()}", f"{self._rounds} {done} of {total or 'all'}")
        self._store.add("all", done - told)
        self._told = (time.monotonic(), done)

    def telling(self, on_progress: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
        """`advance`, and `on_progress` after it."""

        def tell(done: int, total: int) -> None:
            self.advance(done, total)
            if on_progress is not None:
                on_progress(done, total)

        return tell

    def finish(self, *, while_waiting: Callable[[], object] = lambda: None) -> None:
        """This rank is done, or has failed: wait until all are. Collective.

        while_waiting: called twice a second or more often.
        Raises RankTimeoutError that names who is behind when none gets further, or when the store,
        which lives in rank 0, does not answer.
        """
        if self._store is None:
            return
        own = f"rank {dist.get_rank()}"
        try:
            self._store.set(own, f"{self._rounds} done")
            self._wait(self._store, while_waiting)
        except RankTimeoutError:
            raise
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError are such
            raise RankTimeoutError(
                f"{self.name}: {own} was done and rank 0 does not answer: {error}"
            ) from error

    def _wait(self, store: dist.Store, while_waiting: Callable[[], object]) -> None:
        goal = self._rounds * dist.get_world_size()
        seen, since, pause = store.add("done", 1), time.monotonic(), _SHORTEST_PAUSE
        heard = store.add("all", 0)
        while seen < goal:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            now = store.add("done", 0), store.add("all", 0)
            while_waiting()
            if now != (seen, heard):
                (seen, heard), since = now, time.monotonic()
            elif time.monotonic() - since > self.patience:
                raise RankTimeoutError(
                    f"{self.name}: no rank got further for {self.patience:g} s; waiting for "
                    + self._behind(store)
                )

    def _behind(self, store: dist.Store) -> str:
        """The ranks that are not done, with what they told last."""
        told = []
        for rank in range(dist.get_world_size()):
            key = f"rank {rank}"
            words = store.get(key).decode() if store.check([key]) else "0 "
            number, _, what = words.partition(" ")
            if int(number) < self._rounds:
                told.append(f"{key}, which has done nothing yet")
            elif what != "done":
                told.append(f"{key}, which has done {what}")
        return "; ".join(told)

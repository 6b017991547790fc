"""Judging responses while others are still being generated."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import Item
from megatron_rl.types import Verdict

LOOK_SECONDS = 1.0


class Judging:
    """A thread that gives the workers of a pool what is submitted.

    Nothing else may use the pool until `finish` returns. A verdict depends on its item alone: in
    which order items come does not matter.
    """

    def __init__(self, pool: VerifierPool) -> None:
        self._pool = pool
        self._submitted: SimpleQueue[tuple[int, Item] | None] = SimpleQueue()
        self._places: list[int] = []  # in the order of submission
        self._verdicts: dict[int, Verdict] = {}
        self._is_complete = False
        self._error: Exception | None = None
        # A daemon: a run that fails while it generates does not wait for verdicts.
        self._thread = threading.Thread(target=self._run, name="judging", daemon=True)
        self._thread.start()

    def submit(self, place: int, item: Item) -> None:
        """Have an item judged; raises what an earlier one has met, so that a run ends early."""
        if self._error is not None:
            raise self._error
        self._submitted.put((place, item))

    def finish(
        self, *, on_progress: Callable[[int], object] = lambda judged: None
    ) -> dict[int, Verdict]:
        """Every item's verdict by its place, as soon as there is one; raises what was met.

        on_progress: told now and then how many judgements the pool has made in its life.
        """
        self._submitted.put(None)
        while self._thread.is_alive():
            on_progress(self._pool.judged)
            self._thread.join(LOOK_SECONDS)
        if self._error is not None:
            raise self._error
        return self._verdicts

    def _run(self) -> None:
        try:
            while not self._is_complete:
                self._places = []
                first = self._take(self._submitted.get())
                verdicts = self._pool.verify_all(first, more=self._take_waiting)
                self._verdicts.update(zip(self._places, verdicts, strict=True))
        except Exception as error:  # noqa: BLE001 - raised by `submit` or `finish`
            self._error = error

    def _take(self, submitted: tuple[int, Item] | None) -> list[Item]:
        """What was submitted, its place kept; nothing where that was the end."""
        if submitted is None:
            self._is_complete = True
            return []
        self._places.append(submitted[0])
        return [submitted[1]]

    def _take_waiting(self) -> list[Item]:
        items: list[Item] = []
        while not self._submitted.empty():
            items += self._take(self._submitted.get())
        return items

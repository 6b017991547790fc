"""Grading of responses while others are still being generated."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import Item
from megatron_rl.types import GradeResult

LOOK_SECONDS = 1.0


class GradingSession:
    """A thread that passes submitted items to the workers of a pool.

    Nothing else may use the pool until `finish` returns. A result depends only on its item, not on
    the order of submission.
    """

    def __init__(self, pool: VerifierPool) -> None:
        self._pool = pool
        self._submitted: SimpleQueue[tuple[int, Item] | None] = SimpleQueue()
        self._places: list[int] = []  # in the order of submission
        self._verdicts: dict[int, GradeResult] = {}
        self._is_complete = False
        self._error: Exception | None = None
        # A daemon: a run that fails during generation does not wait for results.
        self._thread = threading.Thread(target=self._run, name="judging", daemon=True)
        self._thread.start()

    def submit(self, place: int, item: Item) -> None:
        """Submit an item for grading; raise the error of an earlier item, if any."""
        if self._error is not None:
            raise self._error
        self._submitted.put((place, item))

    def finish(
        self, *, on_progress: Callable[[int], object] = lambda num_graded: None
    ) -> dict[int, GradeResult]:
        """Wait for all results and return them by place; raise the first error.

        on_progress: called about once per second with the total number of results of the pool.
        """
        self._submitted.put(None)
        while self._thread.is_alive():
            on_progress(self._pool.num_graded)
            self._thread.join(LOOK_SECONDS)
        if self._error is not None:
            raise self._error
        return self._verdicts

    def _run(self) -> None:
        try:
            while not self._is_complete:
                self._places = []
                first = self._take(self._submitted.get())
                grade_results = self._pool.verify_all(first, more=self._take_waiting)
                self._verdicts.update(zip(self._places, grade_results, strict=True))
        except Exception as error:  # noqa: BLE001 - raised by `submit` or `finish`
            self._error = error

    def _take(self, submitted: tuple[int, Item] | None) -> list[Item]:
        """Record the place of a submitted item and return it; nothing at the end marker."""
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

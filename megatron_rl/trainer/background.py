"""Work that training does not wait for: one thread, in order, whose errors come back."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MOST_WAITING = 8  # jobs; each may hold a step's rollouts


class BackgroundWriter:
    """Runs jobs one after the other; the first error is raised by every later call, and ends them.

    The interpreter waits for jobs under way before it exits.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._waiting: deque[Future[None]] = deque()
        self._error: Exception | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` after those before it; waits only where too many are waiting."""
        self._collect(leave=MOST_WAITING - 1)
        self._waiting.append(self._thread.submit(self._run, job))

    def wait(self) -> None:
        """Return when every job is done."""
        self._collect(leave=0)

    def _run(self, job: Callable[[], object]) -> None:
        if self._error is not None:
            return  # a row must not appear without the rollouts that failed before it
        try:
            job()
        except Exception as error:  # noqa: BLE001 - raised by the next call of the owner
            self._error = error

    def _collect(self, *, leave: int) -> None:
        while self._waiting and (len(self._waiting) > leave or self._waiting[0].done()):
            self._waiting.popleft().result()
        if self._error is not None:
            raise self._error

"""Background work: one thread that runs jobs in order and reports their errors."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

MAX_QUEUED = 8  # jobs; each may keep a step's rollouts in memory


class BackgroundWriter:
    """Runs jobs one after the other in a thread.

    After the first error no further job runs, and every later call raises that error. The
    interpreter waits for running jobs before it exits.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._waiting: deque[Future[None]] = deque()
        self._error: Exception | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Queue `job`; blocks only while the queue is full."""
        self._collect(leave=MAX_QUEUED - 1)
        self._waiting.append(self._thread.submit(self._run, job))

    def wait(self) -> None:
        """Return when every job is done."""
        self._collect(leave=0)

    def _run(self, job: Callable[[], object]) -> None:
        if self._error is not None:
            return  # a metrics row must not be written if its rollouts failed to be
        try:
            job()
        except Exception as error:  # noqa: BLE001 - raised by the caller's next call
            self._error = error

    def _collect(self, *, leave: int) -> None:
        while self._waiting and (len(self._waiting) > leave or self._waiting[0].done()):
            self._waiting.popleft().result()
        if self._error is not None:
            raise self._error

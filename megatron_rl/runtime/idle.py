"""Time without progress, of which the time that a job was suspended is no part."""

import time
from collections.abc import Callable

_PARTS = 4


class IdleTime:
    """Seconds since the last progress of what a process looks at again and again.

    Between two looks at most a quarter of the limit counts: a job that was suspended (SIGSTOP, of
    SLURM for instance) has not been idle, and goes on. A hang is found after a few looks.
    """

    def __init__(self, limit: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Record progress."""
        self.seconds, self._looked = 0.0, self._clock()

    def is_over(self) -> bool:
        """Look at the clock; returns True once the limit is reached."""
        now = self._clock()
        self.seconds += min(now - self._looked, self.limit / _PARTS)
        self._looked = now
        return self.seconds >= self.limit

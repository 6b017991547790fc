"""Breakdown of the time before the first step."""

import time

import psutil


class StartUp:
    """Seconds of each part of the start-up, recorded when the part ends.

    The first part, from the start of the command until this object is created, is `imports`.
    since: when the command was started, in seconds since the epoch; None: with this process.
    """

    def __init__(self, since: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._last = psutil.Process().create_time() if since is None else since
        self.ended("imports")

    def ended(self, part: str) -> None:
        """Record that `part` ended now; it started when the previous part ended."""
        now = time.time()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Return `time/start_<part>`, in seconds."""
        return {f"time/start_{part}": seconds for part, seconds in self.seconds.items()}

    def __str__(self) -> str:
        parts = ", ".join(
            f"{part.replace('_', ' ')} {seconds:.1f}" for part, seconds in self.seconds.items()
        )
        return f"start-up took {sum(self.seconds.values()):.1f} s: {parts}"

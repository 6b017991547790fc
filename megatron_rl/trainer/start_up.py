"""Where the time before the first step goes."""

import time

import psutil


class StartUp:
    """Seconds of this process up to its first step, by part; a part ends where it is named.

    The first, from the process's start until this is made, is called `imports`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = psutil.Process().create_time()
        self.ended("imports")

    def ended(self, part: str) -> None:
        """Charge what passed since the last part ended."""
        now = time.time()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """`time/start_<part>`, in seconds."""
        return {f"time/start_{part}": seconds for part, seconds in self.seconds.items()}

    def __str__(self) -> str:
        parts = ", ".join(
            f"{part.replace('_', ' ')} {seconds:.1f}" for part, seconds in self.seconds.items()
        )
        return f"start-up took {sum(self.seconds.values()):.1f} s: {parts}"

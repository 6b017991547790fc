"""Checks that processes are running, and waiting for their exit."""

import time
from collections.abc import Iterable
from pathlib import Path


def is_running(pid: int) -> bool:
    """A zombie that nobody has waited for does not; one may end while it is read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_end(pids: Iterable[int], *, within: float = 60) -> None:
    """Wait until none of the processes is running."""
    pids, deadline = list(pids), time.monotonic() + within
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"{left} still run after {within} s"
        time.sleep(0.02)

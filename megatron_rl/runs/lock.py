"""Lock on a folder that only one process may use at a time."""

import errno
import fcntl
from pathlib import Path
from typing import IO

LOCK = ".lock"  # name of the lock file in the folder


def find_holder(lock: Path) -> str | None:
    """Return the description that the owner of a lock wrote, or None if another could take it.

    Must not be called for a lock owned by this process.
    """
    if not lock.is_file():
        return None
    with lock.open("a+", encoding="utf-8") as file:
        if take_lock(file):
            return None
        file.seek(0)
        return file.read().strip()


def take_lock(file: IO[str]) -> bool:
    """Lock an open file until it is closed; returns False if another process owns the lock.

    The kernel or the NFS server releases the lock when the process exits. On file systems without
    locks this always succeeds.
    """
    try:
        # A record lock: forked processes do not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True

"""The lock on a folder that one process works in at a time."""

import errno
import fcntl
from typing import IO

LOCK = ".lock"  # its file in the folder


def take_lock(file: IO[str]) -> bool:
    """Whether no other process holds the file; it is held until it is closed.

    The kernel lets go of it however the process ends, an NFS server too. File systems without
    locks hold nothing.
    """
    try:
        # A record lock: what this process forks does not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True

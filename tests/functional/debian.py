"""Programs of Debian that tests need, installed where that is allowed."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def missing(programs: Sequence[str], *, packages: Sequence[str]) -> str | None:
    """Why a program is not here, after an attempt to install it; None where all are."""
    os.environ["PATH"] += os.pathsep + "/usr/sbin"
    if _lacking(programs) and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
        # Another test may be installing: apt-get would give up at once.
        with (Path(tempfile.gettempdir()) / "megatron_rl-apt-get.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for command in (["apt-get", "update"], install):
                subprocess.run(command, capture_output=True, env=quiet, timeout=300, check=False)
    if lacking := _lacking(programs):
        return f"{', '.join(lacking)} missing: apt-get install {' '.join(packages)} did not help"
    return None


def _lacking(programs: Sequence[str]) -> list[str]:
    return [name for name in programs if shutil.which(name) is None]

"""Check with `megatron-rl dry-run` that a run fits on its devices, before any process starts."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_rl.config import Config, ConfigError, dump_config

DOES_NOT_FIT = 3  # the exit status of a dry run of a run that does not fit
# Environment variables of a rank, which would make the dry run act as one.
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def host_memory() -> int:
    """Return the memory of this host in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(
    config: Config, *, world_size: int, device_bytes: int | None, host_bytes: int | None = None
) -> str | None:
    """Raise ConfigError if the run does not fit; return a warning if the check itself failed.

    device_bytes: memory of one device; None without a device, which skips the check. host_bytes:
    one process's share of its host's memory, if what it pins there is to be compared. The dry run
    uses its own process because it creates the process groups of the whole run.
    """
    if device_bytes is None or not config.run.check_memory:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        command = [
            sys.executable, "-m", "megatron_rl.cli", "dry-run", str(file),
            "--processes", str(world_size), "--fit", str(device_bytes / 2**30),
        ]  # fmt: skip
        if host_bytes is not None:
            command += ["--host", str(host_bytes / 2**30)]
        environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
        completed = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            env=environment,
        )
    output = completed.stderr.strip().rpartition("megatron-rl: error: ")[
        2
    ]  # progress is printed before it
    if completed.returncode == DOES_NOT_FIT:
        raise ConfigError(f"{output}; or skip this check with run.check_memory=false")
    if completed.returncode == 0:
        return None
    last = output.splitlines()[-1] if output else f"it exited with status {completed.returncode}"
    return f"could not check that this run fits on its devices, because the dry run failed: {last}"

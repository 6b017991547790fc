"""Whether a run fits on its devices: asked of `megatron-rl rehearse` before any process starts."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_rl.config import Config, ConfigError, dump_config

DOES_NOT_FIT = 3  # the exit status of a rehearsal of a run that does not fit
# A rank's environment, in which the rehearsal would take itself for one.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_memory(config: Config, *, world_size: int, device_bytes: int | None) -> str | None:
    """Why this is not known, or None; ConfigError, with what cures it, where a run cannot fit.

    device_bytes: of one device; None where there is none, and nothing to check. A process of its
    own rehearses: it makes process groups of the whole run.
    """
    if device_bytes is None or not config.run.check_memory:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(config))
        command = [
            sys.executable, "-m", "megatron_rl.cli", "rehearse", str(file),
            "--processes", str(world_size), "--fit", str(device_bytes / 2**30),
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k not in OF_A_RANK}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = done.stderr.strip().removeprefix("megatron-rl: error: ")
    if done.returncode == DOES_NOT_FIT:
        raise ConfigError(f"{said}; or start it all the same by run.check_memory=false")
    if done.returncode == 0:
        return None
    last = said.splitlines()[-1] if said else f"it ended with status {done.returncode}"
    return f"whether this run fits on its devices is not known, for its rehearsal failed: {last}"

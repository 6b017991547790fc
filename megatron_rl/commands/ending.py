"""How a command's process ends: what is said of an error, on which rank, and with which status."""

import atexit
import contextlib
import errno
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from megatron_rl.config import Config, ConfigError
from megatron_rl.processes import ProcessPlace

EXIT_SECONDS = 10.0


def fail(error: Exception, place: ProcessPlace | None, config: Config | None = None) -> int:
    """Say what went wrong; a rank of a run also leaves its traceback in the log, and ends.

    Raises the error again where no rank is, and it is not one that was meant to be said.
    """
    if place is None:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            said = (
                f"{sys.prefix} has no torch: it is an environment for launching alone; call "
                ".venv/bin/megatron-rl, in the one that tools/setup_env.sh makes"
            )
        elif _is_told(error):
            said = str(error)
        else:
            raise error
        print(f"megatron-rl: error: {said}", file=sys.stderr, flush=True)
        return 1
    if isinstance(error, ValueError):
        _say_error(error, place)
    else:
        print(f"megatron-rl: rank {place.rank} failed", file=sys.stderr)
        traceback.print_exception(error)
        if is_full_disk(error):
            print(
                "megatron-rl: error: a disk is full; nothing that was saved is lost: free some of "
                "it, and continue by the same run.name with run.resume=auto",
                file=sys.stderr,
            )
    if config is not None and _is_training():  # before, the run directory may be another run's
        _log_failure(error, place, config)
    # What it waits for at the exit may have failed too.
    deadline = threading.Timer(EXIT_SECONDS, os._exit, (1,))
    deadline.daemon = True
    deadline.start()
    return leave(1)


def is_full_disk(error: BaseException | None) -> bool:
    """Whether a full disk is the cause, here or on the rank whose error this one repeats."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _log_failure(error: Exception, place: ProcessPlace, config: Config) -> None:
    from megatron_rl.console import Console
    from megatron_rl.runs.directory import RunDirectory

    trace = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # a full disk, perhaps the very error
        log = Console(speaks=True, log_file=RunDirectory.of(config).log_file)
        log.log(f"rank {place.rank} failed\n{trace}")


def leave(status: int) -> NoReturn:
    """End this process without the interpreter's own end."""
    # vLLM and Triton only complain when the interpreter takes them down. What was registered for
    # the exit must run all the same: it ends the checkpoint writer's processes.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _say_error(error: ValueError, place: ProcessPlace) -> None:
    """Once on each node for what every rank finds before training, later by the rank that fails."""
    if place.local_rank == 0:
        detail = "" if isinstance(error, ConfigError) else _origin(error)
        print(f"megatron-rl: error: {error}{detail}", file=sys.stderr, flush=True)
    elif _is_training() and not isinstance(error, ConfigError):
        print(f"megatron-rl: rank {place.rank}: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(10)  # whoever ends first ends all: the rank that speaks must come first


def _is_told(error: Exception) -> bool:
    """Whether a raise of ours tells the user; what Python or a library raises is our mistake."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = "megatron_rl" in Path(last.filename).parts
    return isinstance(error, ValueError) and ours and (last.line or "").startswith("raise ")


def _is_training() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def _origin(error: ValueError) -> str:
    """The place of an error that is not about the config: the innermost frame of our own code."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if "megatron_rl" in Path(frame.filename).parts
    ]  # fmt: skip
    if not frames:
        return ""
    return f"  [{Path(frames[-1].filename).name}:{frames[-1].lineno}]"

"""Error reporting and exit status of commands."""

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from megatron_rl.config import Config, ConfigError
from megatron_rl.errors import UserError
from megatron_rl.runtime.failures import (
    FOLDER,
    FULL,
    READ_ONLY,
    Cause,
    Failure,
    OtherRankError,
    RankTimeoutError,
    describe_space,
    error_chain,
    free_files,
    is_full_disk,
    is_read_only,
)
from megatron_rl.runtime.joining import ProcessPlace
from megatron_rl.runtime.versions import CPU_INDEX, release_set

EXIT_SECONDS = 10.0
PEER_EXITED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def _is_megatron(error: ModuleNotFoundError) -> bool:
    return (error.name or "").split(".")[0] == "megatron"


def warn(line: str) -> None:
    """Print a line of a command that goes on."""
    print(f"megatron-rl: {line}", file=sys.stderr, flush=True)


def fail(error: Exception, place: ProcessPlace | None, config: Config | None = None) -> int:
    """Report an error and return the exit status; a rank also logs its traceback and exits.

    Outside a rank, errors other than UserError, missing libraries, full disks and OSErrors that
    name a file are raised again.
    """
    if place is None:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            text = (
                f"{sys.prefix} has no torch: it is a launch-only environment; call "
                ".venv/bin/megatron-rl of the environment that tools/setup_env.sh creates"
            )
        elif isinstance(error, ModuleNotFoundError) and _is_megatron(error):
            install = release_set("cpu", "3.11").install_megatron_core
            text = f"{sys.prefix} has no megatron-core, which every run needs: {install}"
        elif isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            text = (
                f"{sys.prefix} has no {error.name}, which every run needs; install all with pip "
                f"install 'megatron_rl[cpu]' --extra-index-url {CPU_INDEX}, or on a machine with a "
                "GPU with pip install 'megatron_rl[cuda]'"
            )
        elif isinstance(error, UserError):
            text = str(error)
        elif isinstance(error, OSError) and error.filename is not None:
            text = str(error) + _origin(error)
        elif is_full_disk(error):  # what writes many files may not name the one that failed
            text = "no space left on the disk: free some, then run the same command again"
        else:
            raise error
        print(f"megatron-rl: error: {text}", file=sys.stderr, flush=True)
        return 1
    failure = _describe(error, place, config)
    try:
        failure.write_to(os.environ[FOLDER])  # the launcher prints one failure of all ranks
    except (KeyError, OSError):
        _print_failure(failure, place, config)
    return leave(1)


def how_to_continue(config: Config) -> str:
    """Return the command that continues a run, or "" if the run has not started."""
    from megatron_rl.runs.directory import RunDirectory

    run = RunDirectory.of(config)
    if not run.config_file.is_file():
        return ""
    step = max(run.checkpoints.intact_steps(), default=None)
    how = (
        "nothing is saved yet; restart with"
        if step is None
        else f"resume from the checkpoint of step {step} with"
    )
    return f"{how}\n  megatron-rl train --config {run.config_file} run.resume=auto"


def _describe(error: Exception, place: ProcessPlace, config: Config | None) -> Failure:
    is_training = config is not None and _is_training()
    log = _log_failure(error, place, config) if config is not None and is_training else None
    is_user_error = isinstance(error, UserError)
    if is_full_disk(error):
        text = f"no space left on the disk of {_full_path(error, config)}: free some; all saved "
        text += "data is intact"
        with contextlib.suppress(OSError):
            text += f" ({describe_space(_full_folder(config))})"
    elif is_read_only(error):
        path = _path_of(error, READ_ONLY) or "the run"
        text = f"the disk of {path} has become read-only, as after an error of the device or its "
        text += "server: make it writable, then continue; all saved data is intact"
    elif is_user_error:
        text = str(error) + _origin(error)
    else:
        text = _first_line(error)
    if not is_user_error:
        text = (f"rank {place.rank}: " if place.world_size > 1 else "") + text
        text += "" if log is None else f"\n  stack traces: {log}"
    return Failure(
        rank=place.rank,
        cause=_cause(error),
        text=text,
        in_training=is_training and not isinstance(error, ConfigError),
        details="" if is_user_error or log else "".join(traceback.format_exception(error)),
    )


def _first_line(error: Exception) -> str:
    """Return the first line of an error, with its type unless the class is one of ours."""
    text = str(error)
    if isinstance(error, ValidationError):  # of vLLM's arguments; the first line only counts them
        text = "; ".join(one["msg"] for one in error.errors())
    first = next(iter(text.strip().splitlines()), "")
    ours = type(error).__module__.startswith("megatron_rl") or isinstance(error, FloatingPointError)
    return first if ours and first else f"{type(error).__name__}: {first}"


def _cause(error: Exception) -> Cause:
    chain = list(error_chain(error))
    if any(isinstance(each, OtherRankError) for each in chain):
        return Cause.OTHER_RANK
    peer_exited = any(text in str(each) for each in chain for text in PEER_EXITED)
    if peer_exited or any(isinstance(each, RankTimeoutError) for each in chain):
        return Cause.LOST_RANK
    return Cause.OWN


def _full_path(error: Exception, config: Config | None) -> str:
    """Return the file that could not be written, or the folder in use with the least space."""
    return _path_of(error, FULL) or _full_folder(config)


def _path_of(error: Exception, numbers: Sequence[int]) -> str | None:
    """Return the file of which the system has reported one of these errors."""
    for each in error_chain(error):
        if getattr(each, "errno", None) in numbers and getattr(each, "filename", None):
            return str(each.filename)  # type: ignore[attr-defined]
    return None


def _full_folder(config: Config | None) -> str:
    folders = [tempfile.gettempdir(), "/dev/shm"]
    if config is not None and config.run.name is not None:
        folders.insert(0, str(Path(config.run.dir) / config.run.name))
    existing = [folder for folder in folders if os.path.isdir(folder)]
    # Also full without an inode for another file.
    return min(
        existing, key=lambda folder: free_files(folder) != 0 and shutil.disk_usage(folder).free
    )


def _log_failure(error: Exception, place: ProcessPlace, config: Config) -> Path | None:
    """Append the traceback to the run's log; returns the log, or None if it cannot be written."""
    from megatron_rl.runs.directory import RunDirectory
    from megatron_rl.telemetry.console import Console

    trace = "".join(traceback.format_exception(error))
    file = RunDirectory.of(config).log_file
    with contextlib.suppress(OSError):  # the disk may be full
        Console(is_main_rank=True, log_file=file).log(f"rank {place.rank} failed\n{trace}")
        return file
    return None


def _print_failure(failure: Failure, place: ProcessPlace, config: Config | None) -> None:
    """Print a failure from the rank itself, for launchers other than ours."""
    if failure.cause is not Cause.OWN:
        print(f"megatron-rl: {failure.text.splitlines()[0]}", file=sys.stderr, flush=True)
    elif place.local_rank == 0 or failure.in_training or failure.details:
        to_continue = how_to_continue(config) if config is not None else ""
        print(failure.lines(to_continue=to_continue), end="", file=sys.stderr, flush=True)
    else:
        time.sleep(EXIT_SECONDS)  # the first exit ends all ranks: let the printing rank exit first


def leave(status: int) -> NoReturn:
    """Exit this process without the interpreter's shutdown."""
    # Exit handlers may wait for something that has failed too, such as a server of a logger.
    deadline = threading.Timer(EXIT_SECONDS, os._exit, (status,))
    deadline.daemon = True
    deadline.start()
    # vLLM and Triton print errors during the interpreter's shutdown. Exit handlers must still run:
    # they stop the processes of the checkpoint writer.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _is_training() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


def _origin(error: Exception) -> str:
    """Return the innermost frame of our code, or "" for errors about the config."""
    if isinstance(error, ConfigError):
        return ""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if "megatron_rl" in Path(frame.filename).parts
    ]  # fmt: skip
    if not frames:
        return ""
    return f"  [{Path(frames[-1].filename).name}:{frames[-1].lineno}]"

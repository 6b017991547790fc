"""Start the ranks of one node and wait for their end.

Imports take most of the time before the first step. The launcher therefore imports once what every
rank needs, then forks the ranks.
"""

import contextlib
import gc
import importlib
import math
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_rl.runtime.failures import FOLDER, Cause, Failure, first_failure
from megatron_rl.runtime.interruption import (
    INTERRUPTED,
    Interruption,
    exit_before_first_step,
    handled_signals,
)
from megatron_rl.runtime.joining import notify
from megatron_rl.runtime.processes import (
    LAUNCHER,
    has_cuda,
    use_downloaded_files,
    without_garbage_collection,
)
from megatron_rl.runtime.rank_process import POLL_SECONDS, RankProcess, end_all

CAUSE_SECONDS = 10.0  # to wait for the rank that caused another rank's failure
PROGRAM = "megatron_rl.cli"


def start_processes(
    arguments: list[str],
    *,
    world_size: int,
    modules: Sequence[str] = (),
    find_stall: Callable[[], object] = lambda: None,
    to_continue: Callable[[], str] = lambda: "",
) -> int:
    """Run `megatron-rl ARGUMENTS` in `world_size` processes of this node; returns the exit code.

    If one process fails, the others are killed, and its error is printed last. The first signal
    that requests a stop is forwarded, and the processes may finish; a second one kills them.
    modules: what every process imports before its first step; none: start new interpreters.
    find_stall: returns the report of the watchdog if it killed the processes because they hung.
    to_continue: returns the message that describes how to resume after a failure.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # single node: do not resolve its host name
    interruption, insistent = Interruption(), threading.Event()

    def take(number: int, frame: object) -> None:
        interruption.take(signal.Signals(number), at_second=insistent.set)

    previous = {each: signal.signal(each, exit_before_first_step) for each in handled_signals()}
    run = partial(_run_rank, arguments, is_imported=_import_once(modules))
    for each in previous:
        signal.signal(each, take)
    try:
        codes, failure = _run_processes(run, world_size, interruption, insistent)
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
    if insistent.is_set():
        return 128 + signal.SIGTERM
    if any(codes) and (report := find_stall()) is not None:
        notify(f"the run hung and was killed: {report}; restart it with run.resume=auto")
        return INTERRUPTED
    status = max(codes, key=lambda code: (code not in (0, INTERRUPTED), code))
    for rank, code in enumerate(codes):
        if code < 0:
            hint = " (often the out-of-memory killer)" if -code == signal.SIGKILL else ""
            name = signal.Signals(-code).name
            text = f"rank {rank} was killed by signal {-code}, {name}{hint}"
            failure, status = Failure(rank, Cause.OWN, text, in_training=True), 128 - code
            break
    if failure is not None and status not in (0, INTERRUPTED):
        sys.stderr.write(failure.lines(to_continue=to_continue()))
        sys.stderr.flush()
    return status


def _run_processes(
    run: Callable[[], object],
    world_size: int,
    interruption: Interruption,
    insistent: threading.Event,
) -> tuple[list[int], Failure | None]:
    """Fork the ranks; returns their exit codes and the failure that ended them, if any."""
    port = _find_port()
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="megatron_rl-", dir=shared)
    processes: list[RankProcess] = []
    try:
        for rank in range(world_size):
            variables = _variables(rank, world_size, port) | {FOLDER: folder}
            processes.append(RankProcess(run, variables))
        codes = _wait_for_end(processes, interruption, insistent, Path(folder))
    finally:
        end_all(processes)
        failure = first_failure(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return codes, failure


def _import_once(modules: Sequence[str]) -> bool:
    """Import the modules of the ranks; returns False if ranks must be started as new interpreters.

    A fork copies only the thread that calls it, and no initialised CUDA driver.
    """
    use_downloaded_files()
    with without_garbage_collection():
        for module in modules:
            with contextlib.suppress(Exception):  # each rank imports it again, and reports this
                importlib.import_module(module)
            if _has_initialised_cuda():
                return False
        gc.freeze()  # ranks share this memory as long as no collection writes to it
    return bool(modules) and threading.active_count() == 1


def _has_initialised_cuda() -> bool:
    if not has_cuda() or "torch" not in sys.modules:
        return False
    import torch

    return torch.cuda.is_initialized()


def _run_rank(arguments: list[str], *, is_imported: bool) -> None:
    """Run the command in this process, which its launcher has just forked.

    Starts a new interpreter if an import of the launcher has made CUDA unusable here.
    """
    if not is_imported or not _can_use_devices():
        os.execv(sys.executable, [sys.executable, "-m", PROGRAM, *arguments])
    sys.argv[1:] = arguments
    sys.modules.pop(PROGRAM, None)  # it runs as `__main__`, as in a new interpreter
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)


def _can_use_devices() -> bool:
    if not has_cuda():
        return True
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError):  # AssertionError: a build of torch without CUDA
        return False
    return True


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables of one rank."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        LAUNCHER: os.getpid(),
    }
    return {name: str(value) for name, value in variables.items()}


def _wait_for_end(
    processes: list[RankProcess],
    interruption: Interruption,
    insistent: threading.Event,
    failures: Path,
) -> list[int]:
    """Return the exit code of every rank; 0 for ranks still running when another one failed.

    A rank that succeeds or stops on request does not stop the others.
    """
    is_forwarded, deadline = False, math.inf
    unready: tuple[int, ...] = ()
    while None in (codes := [process.poll() for process in processes]):
        failed = set(codes) - {None, 0, INTERRUPTED, *unready}
        if failed and deadline == math.inf:
            deadline = time.monotonic() + CAUSE_SECONDS
        if insistent.is_set() or (failed and _has_cause(failed, failures)):
            break
        if time.monotonic() > deadline:
            break
        if interruption.received and not is_forwarded:
            is_forwarded = True
            unready = (-signal.SIGTERM,)  # a rank without a handler has not started any work
            notify(
                f"Received {interruption.received.name}: stopping as soon as the run can be "
                "resumed; a second signal kills it immediately"
            )
            for process in processes:
                process.send(signal.SIGTERM)
        time.sleep(POLL_SECONDS)
    return [INTERRUPTED if code in unready else code or 0 for code in codes]


def _has_cause(codes: set[int | None], failures: Path) -> bool:
    """Return True if the cause of the failure is known; otherwise its rank may still be exiting."""
    failure = first_failure(failures)
    is_killed = any(code is not None and code < 0 for code in codes)
    return is_killed or failure is None or failure.cause is Cause.OWN


def _find_port() -> int:
    """Return a free port for the rendezvous, below the system's ephemeral ports."""
    for offset in range(10_000):
        port = 20_000 + (os.getpid() + offset) % 10_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of the ports 20000 to 29999 is free on this node")

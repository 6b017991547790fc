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
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatron_rl.runtime.failures import FOLDER, Cause, Failure, first_failure
from megatron_rl.runtime.interruption import (
    INTERRUPTED,
    SIGNALS,
    Interruption,
    exit_before_first_step,
    handled_signals,
)
from megatron_rl.runtime.joining import notify
from megatron_rl.runtime.processes import (
    LAUNCHER,
    has_cuda,
    shared_folder,
    use_downloaded_files,
    without_garbage_collection,
)

POLL_SECONDS = 0.1
CLEAN_UP_SECONDS = 3.0


class RankProcess:
    """A forked process in its own session, so that Ctrl-C reaches only the launcher.

    `end_all` collects its exit status, not `poll`: until then the system does not give its id, and
    the id of its process group, to another process, which a signal would reach instead.
    run, environment: the function that it calls, after adding these environment variables.
    """

    def __init__(self, run: Callable[[], object], environment: Mapping[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # Otherwise a signal sent to the new process would call the launcher's handler there.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled_signals())
        self.pid = os.fork()
        if self.pid == 0:
            _run_and_exit(run, environment, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait until the process has exited; returns its exit code."""
        code = self._wait(0)
        assert code is not None
        return code

    def _wait(self, options: int) -> int | None:
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | options)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send(self, number: signal.Signals) -> None:
        """Send the process a signal; nothing happens if it has exited."""
        os.kill(self.pid, number)


def _run_and_exit(
    run: Callable[[], object], environment: Mapping[str, str], mask: set[int | signal.Signals]
) -> NoReturn:
    """Call `run` with signals as in a new process, then exit without the launcher's exit handlers.

    An exit of the interpreter would remove what belongs to the launcher.
    """
    status = 1
    try:
        os.setsid()
        for each in SIGNALS:
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ.update(environment)
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the process exits
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def end_all(processes: Sequence[RankProcess]) -> None:
    """Kill the processes, then their children: reward workers and checkpoint writers."""
    for process in processes:
        process.send(signal.SIGKILL)
        process.wait()
    deadline, groups = time.monotonic() + CLEAN_UP_SECONDS, {process.pid for process in processes}
    while _is_any_alive(groups) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has not become a group
            os.killpg(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)


def _is_any_alive(groups: set[int]) -> bool:
    """Return True if a process of these groups is alive; zombies do not count.

    The first process of a container inherits the children of a rank and often does not reap them.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has exited
            text = (process / "stat").read_text(encoding="utf-8", errors="replace")
            state, _, group = text.rsplit(")", 1)[1].split()[:3]
            if int(group) in groups and state not in "ZX":
                return True
    return False


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

    def on_signal(number: int, frame: object) -> None:
        interruption.record_signal(signal.Signals(number), at_second=insistent.set)

    previous = {each: signal.signal(each, exit_before_first_step) for each in handled_signals()}
    run = partial(_run_rank, arguments, is_imported=_import_once(modules))
    for each in previous:
        signal.signal(each, on_signal)
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
    processes: list[RankProcess] = []
    with shared_folder() as folder:
        try:
            for rank in range(world_size):
                variables = _variables(rank, world_size, port) | {FOLDER: str(folder)}
                processes.append(RankProcess(run, variables))
            codes = _wait_for_end(processes, interruption, insistent, folder)
        finally:
            end_all(processes)
        return codes, first_failure(folder)


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

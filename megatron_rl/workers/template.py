"""The process that imports a user's module, and the processes that are forked from it.

Started by the broker as `python -m megatron_rl.workers.template`. A fork has everything that the
module loaded, takes milliseconds, and shares its memory until it writes to it. Each runs in a
session of its own with default signal handlers, and its orphans stay below it, so that all that it
starts can be ended with it.

Lines of JSON, to the broker: {"ready": description} or {"error": text}, then {"pid": 7} with a
pidfd for each byte that it sends together with a socket, and {"ended": 7, "status": -9}.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import itertools
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.runtime.interruption import SIGNALS, end_with_parent
from megatron_rl.texts import clean

_MOST_FRAMES, _LONGEST_TEXT = 30, 300  # of an error that is described
_LONGEST_PART, _LONGEST_TRACE = 2000, 20_000
LONGEST_LINE = 1 << 30  # bytes of a message
FORK_SECONDS = 60.0  # in which the system must have room for another process

Load = Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[socket.socket], None]]]

_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38  # linux/prctl.h
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446  # of all architectures
_LANDLOCK_ABI_WITH_SCOPES = 6  # Linux 6.12
_LANDLOCK_SCOPE_SIGNAL = 2


def ignore_job_signals() -> None:
    """Do nothing on the signals of Ctrl-C and SLURM, while the trainer finishes its step.

    Handlers and not SIG_IGN: a program that this process starts has the default actions again.
    """
    for request in SIGNALS:
        signal.signal(request, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the trainer blocks them


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide_other_processes() -> None:
    """Deny this process and its descendants the memory and the variables of all other processes.

    By a Landlock domain that restricts nothing else but signals to outside, such as those of `kill
    -9 -1` or `pkill python`; Linux before 6.12 could only deny that together with mounts, which
    sandboxes need.
    """
    system = ctypes.CDLL(None)
    if system.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1) < _LANDLOCK_ABI_WITH_SCOPES:
        return
    rules = (ctypes.c_uint64 * 3)(0, 0, _LANDLOCK_SCOPE_SIGNAL)  # files, network, scopes
    domain = system.syscall(_LANDLOCK_CREATE_RULESET, rules, ctypes.sizeof(rules), 0)
    system.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    system.syscall(_LANDLOCK_RESTRICT_SELF, domain, 0)
    os.close(domain)


def main() -> None:
    """Load what the settings name, then fork until the broker closes the socket."""
    settings, temporary = json.loads(sys.argv[1]), os.environ["TMPDIR"]
    end_with_parent(settings["parent"])
    ignore_job_signals()
    hide_other_processes()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (settings["files"], hard))
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is the log, which units share
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    control = socket.socket(fileno=settings["control"])
    control.set_inheritable(False)
    try:
        module, _, name = settings["load"].partition(":")
        load: Load = getattr(importlib.import_module(module), name)
        description, serve = load(settings)
    except UserError as error:
        _tell(control, {"error": clean(str(error))})
        return
    except BaseException:  # noqa: BLE001 - the trainer raises it
        _tell(control, {"error": clean(traceback.format_exc())})
        return
    if others := [one.name for one in threading.enumerate() if one is not threading.main_thread()]:
        sys.stderr.write(
            f"importing it started threads ({', '.join(others)}), which the processes of "
            "conversations and verifiers do not have; start them when they are needed\n"
        )
    _tell(control, {"ready": description})
    gc.collect()
    gc.freeze()  # so that a collection in a fork does not write to what it shares
    Template(control, serve, temporary=temporary, memory_gib=settings["memory_gib"]).run()


class Template:
    """Forks on request, and reports how the forks end."""

    def __init__(
        self,
        control: socket.socket,
        serve: Callable[[socket.socket], None],
        *,
        temporary: str,
        memory_gib: Any,
    ) -> None:
        self._control, self._serve, self._memory_gib = control, serve, memory_gib
        self._loaded = _data_bytes()
        self._units: set[int] = set()
        self._forks = itertools.count()
        self._temporary = temporary
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._wake = wake

    def run(self) -> None:
        """Serve until the broker's end of the socket is closed."""
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 1 << 16)
                self._reap()
            if self._control.fileno() in ready:
                request, files, _, _ = socket.recv_fds(self._control, 1, 2)
                if not request:
                    return
                self._fork(socket.socket(fileno=files[0]), output=files[1])

    def _reap(self) -> None:
        for pid in list(self._units):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._units.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                _tell(self._control, {"ended": pid, "status": code})

    def _fork(self, channel: socket.socket, *, output: int) -> None:
        parent, number = os.getpid(), next(self._forks)
        channel.set_inheritable(False)  # programs that a conversation starts must not answer for it
        if (pid := self._fork_in_time()) == 0:
            status = 1
            try:
                for file in (1, 2):
                    os.dup2(output, file)
                os.close(output)
                self._become_unit(parent)
                use_folder(temporary_folder(self._temporary, number), instead_of=self._temporary)
                self._serve(channel)
                status = 0
            except BaseException:  # noqa: BLE001 - printed; the broker sees the exit status
                traceback.print_exc()
            finally:
                os._exit(status)  # threads that are left do not delay the end
        channel.close()
        os.close(output)
        self._units.add(pid)
        handle = os.pidfd_open(pid)  # exists: only `_reap` removes it
        line = json.dumps({"pid": pid}).encode() + b"\n"
        socket.send_fds(self._control, [line], [handle])
        os.close(handle)

    def _fork_in_time(self) -> int:
        """Fork; where that fails, others may use all processes or all memory for the moment."""
        deadline = time.monotonic() + FORK_SECONDS
        while True:
            try:
                return os.fork()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                self._reap()
                time.sleep(0.1)

    def _become_unit(self, parent: int) -> None:
        signal.set_wakeup_fd(-1)
        for request in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if request not in (signal.SIGPIPE, signal.SIGXFSZ):  # Python has exceptions for them
                signal.signal(request, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        end_with_parent(parent)
        adopt_orphans()
        hide_other_processes()  # those of other conversations, too
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # where memory is short, the kernel ends it and not the trainer
        self._control.close()
        os.close(self._woken)
        os.close(self._wake)
        if self._memory_gib is not None:
            limit_memory(self._loaded + int(self._memory_gib * 2**30))


def temporary_folder(parent: str, number: int) -> str:
    """Return the folder for temporary files of the fork of this number, from 0 on."""
    return os.path.join(parent, str(number))


def use_folder(folder: str, *, instead_of: str) -> None:
    """Make a folder, and let this process and its children put temporary files there.

    Nothing changes where the module has chosen a place of its own.
    """
    os.makedirs(instead_of, 0o700, exist_ok=True)  # a cleaner of /tmp may have removed it
    os.mkdir(folder, 0o700)
    if os.environ.get("TMPDIR") == instead_of:
        os.environ["TMPDIR"] = folder
    if tempfile.tempdir == instead_of:
        tempfile.tempdir = folder


def describe_error(error: BaseException, *, memory_gib: float | None) -> tuple[str, str]:
    """Return an error's text in one line, and its traceback, both cleaned and shortened.

    memory_gib: the limit, which no longer applies, since a description needs memory, too: the
    process is to end soon.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    whole = traceback.TracebackException.from_exception(error, limit=-_MOST_FRAMES)
    trace = "".join(part[:_LONGEST_PART] for part in whole.format())[-_LONGEST_TRACE:]
    text = " ".join(str(whole)[:_LONGEST_PART].split())
    text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
    if isinstance(error, MemoryError) and memory_gib is not None:
        limit = f"workers.memory_gib={memory_gib:g} GiB"
        hint = f"its process may use {limit}; raise it, or null for no limit"
        text, trace = f"{text}; {hint}", f"{trace}{hint}"
    return clean(text), clean(trace)


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """End a process that code within this has forked, and that leaves it as well."""
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            error = sys.exception()
            code = error.code if isinstance(error, SystemExit) else int(error is not None)
            os._exit(code if isinstance(code, int) else 1)


def limit_memory(wanted: int) -> None:
    """Limit this process's private memory in bytes; files and reserved addresses do not count."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def _tell(control: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the broker is gone
        control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()

"""The process that imports a user's module, and the processes that are forked from it.

Started by the broker as `python -m megatron_rl.workers.template`. A fork has everything that the
module loaded, takes milliseconds, and shares its memory until it writes to it. Each runs in a
session of its own with default signal handlers, and its orphans stay below it, so that all that it
starts can be ended with it.

Lines of JSON, to the broker: {"ready": description} or {"error": text}, then {"pid": 7} with a
pidfd for each byte that it sends together with a socket, and {"ended": 7, "status": -9}.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.runtime.interruption import SIGNALS, end_with_parent
from megatron_rl.texts import clean

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

    By a Landlock domain that restricts nothing else but signals to outside; Linux before 6.12 could
    only deny that together with mounts, which sandboxes need.
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
    """Load what the arguments name, then fork until the broker closes the socket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--files", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    arguments = parser.parse_args()
    end_with_parent(arguments.parent)
    ignore_job_signals()
    hide_other_processes()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (arguments.files, hard))
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is the log, which units share
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    control = socket.socket(fileno=arguments.control)
    control.set_inheritable(False)
    settings = arguments.settings
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
    Template(control, serve, memory_gib=settings["memory_gib"]).run()


class Template:
    """Forks on request, and reports how the forks end."""

    def __init__(
        self, control: socket.socket, serve: Callable[[socket.socket], None], *, memory_gib: Any
    ) -> None:
        self._control, self._serve, self._memory_gib = control, serve, memory_gib
        self._loaded = _data_bytes()
        self._units: set[int] = set()
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
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                for file in (1, 2):
                    os.dup2(output, file)
                os.close(output)
                self._become_unit(parent)
                self._serve(channel)
            except BaseException:  # noqa: BLE001 - printed; the broker sees the exit status
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # threads that are left do not delay the end
        channel.close()
        os.close(output)
        self._units.add(pid)
        handle = os.pidfd_open(pid)  # exists: only `_reap` removes it
        line = json.dumps({"pid": pid}).encode() + b"\n"
        socket.send_fds(self._control, [line], [handle])
        os.close(handle)

    def _become_unit(self, parent: int) -> None:
        signal.set_wakeup_fd(-1)
        for request in (*SIGNALS, signal.SIGCHLD):
            signal.signal(request, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        end_with_parent(parent)
        adopt_orphans()
        self._control.close()
        os.close(self._woken)
        os.close(self._wake)
        if self._memory_gib is not None:
            limit_memory(self._loaded + int(self._memory_gib * 2**30))


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

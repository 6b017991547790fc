"""Processes of the ranks of one node, forked from their launcher."""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_rl.runtime.interruption import SIGNALS, handled_signals

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

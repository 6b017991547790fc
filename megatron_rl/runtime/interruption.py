"""Requests to stop: signals from SLURM before preemption, Ctrl-C, or a closed terminal."""

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import NoReturn

INTERRUPTED = os.EX_TEMPFAIL  # exit status 75: run the same command again to resume

# SIGUSR1 is commonly configured as SLURM's warning before the time limit (`--signal=USR1@600`).
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# SLURM signals both a launcher and its ranks, and a launcher forwards signals to its ranks: signals
# within this time count as one request.
ECHO_SECONDS = 3.0


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int, request: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent exits, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, request)
    if os.getppid() != parent:  # the parent has exited already
        os._exit(128 + request)


class RunInterrupted(Exception):  # noqa: N818 - not an error
    """Early end of a run on request, after saving its progress."""


class Interruption:
    """Request to stop this process, and the signal that made it."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._when = 0.0
        self._is_setting_up = False

    def listen(self, *, is_main_rank: bool = False) -> None:
        """Start handling signals; until `defer` is called, the first signal exits the process.

        After `defer` the first signal is recorded, and a second one exits immediately.
        is_main_rank: print a message if a signal exits the process during setup.
        The signals are blocked in all threads, including threads that libraries start later, and
        one thread waits for them: it responds even if the main thread is inside a collective that
        never returns. Child processes inherit the mask, so that checkpoint writers survive a signal
        to the whole job. Ignored signals, as under nohup, remain ignored.
        """
        self._is_setting_up = True
        signals = handled_signals()
        resource_tracker.ensure_running()  # if it started later, it would unblock the signals
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        threading.Thread(target=self._wait, args=(signals, is_main_rank), daemon=True).start()

    def defer(self) -> None:
        """End the setup: from now on a request waits until progress is saved."""
        self._is_setting_up = False

    def record_signal(self, received: signal.Signals, *, at_second: Callable[[], object]) -> None:
        """Record a signal; calls `at_second` for a second request."""
        if self.received is None:
            self.received, self._when = received, time.monotonic()
        elif time.monotonic() - self._when > ECHO_SECONDS:
            at_second()

    def ignore_further_signals(self) -> None:
        """Ignore further signals: everything is saved and the process is about to exit.

        srun terminates the other ranks when the first one exits; their status must not change.
        """
        self._when = math.inf

    def _wait(self, signals: set[signal.Signals], is_main_rank: bool) -> None:
        while True:
            received = signal.Signals(signal.sigwait(signals))
            if self._is_setting_up:
                if not is_main_rank:
                    os._exit(INTERRUPTED)
                exit_before_first_step()
            self.record_signal(received, at_second=lambda: _exit_now(received))  # noqa: B023


def handled_signals() -> set[signal.Signals]:
    """Return the signals that request this process to stop."""
    return {each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN}


def exit_before_first_step(*_: object) -> NoReturn:
    """Exit because a signal arrived before the first step; usable as a signal handler."""
    # Without the signal's name: the launcher, which always forwards SIGTERM, prints the name of the
    # original signal.
    _print("interrupted before the first step; there is nothing to save")
    os._exit(INTERRUPTED)


def _exit_now(received: signal.Signals) -> None:
    _print(f"second request to stop ({received.name}): exiting immediately")
    os._exit(128 + received)


def _print(text: str) -> None:
    os.write(2, f"megatron-rl: {text}\n".encode())  # unbuffered: the process may exit next

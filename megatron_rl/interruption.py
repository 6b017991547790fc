"""Being asked to end: by SLURM before it takes the nodes back, by Ctrl-C, by a lost terminal."""

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker

INTERRUPTED = os.EX_TEMPFAIL  # exit status 75: start the same command again to go on

# SIGUSR1 is what people let SLURM send ahead of the end (`--signal=USR1@600`).
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# SLURM signals a launcher and its ranks alike, and a launcher passes on what it gets: what comes
# within this time is the same request.
ECHO_SECONDS = 3.0


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int, request: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, request)
    if os.getppid() != parent:  # it has ended already
        os._exit(128 + request)


class RunInterrupted(Exception):  # noqa: N818 - no error
    """The run ended early because it was asked to; what it had done is saved."""


class Interruption:
    """Whether this process was asked to end, and by which signal."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._when = 0.0
        self._is_setting_up = False

    def listen(self, *, speaks: bool = False) -> None:
        """Take requests from now on; the process is being set up, and the first one ends it.

        After `hold` the first one is noted, and a second one ends the process at once.
        speaks: whether to say so.
        Signals are blocked, in libraries' threads too if these start later, and one thread waits
        for them: it answers even while the main thread is inside a collective that never returns.
        Child processes inherit the block, so that those who write a checkpoint survive a signal to
        the whole job. Signals that are ignored, as under nohup, stay so.
        """
        self._is_setting_up = True
        heard = heard_signals()
        resource_tracker.ensure_running()  # where it starts later, it unblocks them
        signal.pthread_sigmask(signal.SIG_BLOCK, heard)
        threading.Thread(target=self._wait, args=(heard, speaks), daemon=True).start()

    def hold(self) -> None:
        """From now on there is something to lose: a request waits for the end of a step."""
        self._is_setting_up = False

    def take(self, received: signal.Signals, *, at_second: Callable[[], object]) -> None:
        """Note one signal."""
        if self.received is None:
            self.received, self._when = received, time.monotonic()
        elif time.monotonic() - self._when > ECHO_SECONDS:
            at_second()

    def settle(self) -> None:
        """What comes now changes nothing: all is saved and the process ends by itself.

        srun ends the other ranks when the first one has ended, which must not change their status.
        """
        self._when = math.inf

    def _wait(self, heard: set[signal.Signals], speaks: bool) -> None:
        while True:
            received = signal.Signals(signal.sigwait(heard))
            if self._is_setting_up:
                if speaks:
                    _say(f"{received.name} before the first step: ended, and nothing is lost")
                os._exit(INTERRUPTED)
            self.take(received, at_second=lambda: _end_at_once(received))  # noqa: B023


def heard_signals() -> set[signal.Signals]:
    """The signals that ask this process to end."""
    return {one for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN}


def _end_at_once(received: signal.Signals) -> None:
    _say(f"{received.name} after another request: ending at once")
    os._exit(128 + received)


def _say(text: str) -> None:
    os.write(2, f"megatron-rl: {text}\n".encode())  # at once: the process may end now

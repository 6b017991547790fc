"""One worker process as its parent sees it, and what all of them print."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from megatron_rl.rewards.verifier import Item, VerifierError

START_SECONDS = 120.0  # to import the verifier: on a crowded machine, sympy from a slow disk
GRACE_SECONDS = 1.0  # for a worker that keeps the time limit itself
# What a worker sees of this process's environment; keys and tokens are none of its business.
_SEEN = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|LANG|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH|SSL_CERT_FILE"
    r"|REQUESTS_CA_BUNDLE|NO_PROXY|no_proxy|LC_\w+|PYTHON\w+|XDG_\w+_HOME|\w+_NUM_THREADS"
    r"|HF_HOME|HF_HUB_OFFLINE|TOKENIZERS_PARALLELISM|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE)"
)


def worker_environment(further: Sequence[str]) -> dict[str, str]:
    """The environment of a worker: ordinary variables, and `further` ones by name.

    Raises VerifierError where one of these is not set.
    """
    missing = [name for name in further if name not in os.environ]
    if missing:
        raise VerifierError(
            f"reward.environment names {', '.join(missing)}, not set here; export it, or unname it"
        )
    seen = {name: value for name, value in os.environ.items()
            if _SEEN.fullmatch(name) or name in further}  # fmt: skip
    # A fresh interpreter finds modules where this one does.
    return seen | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class PrintedLines:
    """What the workers' code prints, line by line, into `say`; they share one pipe."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        source, self._sink = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Where workers write."""
        return self._sink

    def close(self) -> None:
        """Say what is left; the workers have ended."""
        os.close(self._sink)
        self._thread.join(timeout=1)  # what a verifier has started may still hold the pipe

    def _read(self, source: int) -> None:
        with os.fdopen(source, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._say(line.rstrip("\n"))


class WorkerProcess:
    """One process; `places` are the items it is judging: none while it starts or waits.

    It ends with the thread that makes it.
    """

    def __init__(
        self, command: list[str], printed: PrintedLines, environment: Mapping[str, str]
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed.fileno(),
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self.output: IO[bytes] = self._process.stdout
        self._received = b""
        self.is_ready = False
        self.takes_many = False
        self._wants_row = False
        self.places: list[int] = []
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def is_waited_for(self) -> bool:
        return not self.is_ready or bool(self.places)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def get_ready(self, said: dict[str, bool]) -> None:
        """The verifier is loaded and wants to be called so."""
        self.is_ready, self.takes_many, self._wants_row = (
            True,
            said["takes_many"],
            said["wants_row"],
        )

    def send(self, places: list[int], items: Sequence[Item], *, time_limit: float) -> None:
        """Let it judge; `places` are those of `items` in their batch."""
        grace = GRACE_SECONDS if self.takes_many else 0.0
        self.places, self.deadline = places, time.monotonic() + time_limit + grace
        request = [item if self._wants_row else item[:3] for item in items]
        with contextlib.suppress(BrokenPipeError):  # it has died; reading its output says so
            self._input.write(json.dumps(request).encode() + b"\n")
            self._input.flush()

    def take(self, chunk: bytes) -> Any:
        """What it said, or None while a part of it is missing."""
        self._received += chunk
        if not self._received.endswith(b"\n"):
            return None
        line, self._received = self._received, b""
        return json.loads(line)

    def describe_end(self) -> str:
        return f"exit status {self._process.wait()}"

    def stop(self) -> None:
        """End it in peace: its input ends."""
        with contextlib.suppress(BrokenPipeError):  # it has died with something unread
            self._input.close()
        if self.is_waited_for:
            self._process.kill()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.output.close()

    def kill(self) -> None:
        self._process.kill()
        self.stop()

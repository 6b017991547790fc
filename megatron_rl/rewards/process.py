"""The parent's side of a worker process, and the printed output of all of them."""

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
GRACE_SECONDS = 1.0  # for a worker that enforces the time limit itself
# Environment variables passed to a worker; API keys and tokens are not.
_SEEN = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|LANG|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH|SSL_CERT_FILE"
    r"|REQUESTS_CA_BUNDLE|NO_PROXY|no_proxy|LC_\w+|PYTHON\w+|XDG_\w+_HOME|\w+_NUM_THREADS"
    r"|HF_HOME|HF_HUB_OFFLINE|TOKENIZERS_PARALLELISM|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE)"
)


def worker_environment(
    further: Sequence[str] = (), *, setting: str = "reward.environment"
) -> dict[str, str]:
    """Build the environment of a worker from the standard variables and those named in `further`.

    setting: the config key of `further`. Raises VerifierError if a named variable is not set.
    """
    missing = [name for name in further if name not in os.environ]
    if missing:
        raise VerifierError(
            f"{setting} names {', '.join(missing)}, not set here; export it, or unname it"
        )
    seen = {name: value for name, value in os.environ.items()
            if _SEEN.fullmatch(name) or name in further}  # fmt: skip
    # A new interpreter finds modules in the same places as this one.
    return seen | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class PrintedLines:
    """Lines printed by the workers, which share one pipe, passed to `echo`.

    longest: characters of a line that are passed on; None: all. most: lines between two calls of
    `renew` that are passed on, so that a print for every response does not fill the log; None: all.
    """

    def __init__(
        self,
        echo: Callable[[str], object],
        *,
        longest: int | None = None,
        most: int | None = None,
    ) -> None:
        self._echo, self._longest, self._most = echo, longest, most
        self._count = 0
        self._lock = threading.Lock()
        source, self._sink = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the file descriptor that workers write to."""
        return self._sink

    def renew(self) -> None:
        """Pass on as many lines again, after the number of those that were left out."""
        with self._lock:
            left_out = 0 if self._most is None else self._count - self._most
            self._count = 0
        if left_out > 0:
            self._echo(f"{left_out:,} more lines are not shown")

    def close(self) -> None:
        """Pass on the remaining output, after the workers have ended."""
        os.close(self._sink)
        self._thread.join(timeout=1)  # a child of a verifier may still have the pipe open
        self.renew()

    def _read(self, source: int) -> None:
        with os.fdopen(source, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with self._lock:
                    self._count += 1
                    is_shown = self._most is None or self._count <= self._most
                if is_shown:
                    self._echo(self._shorten(line.rstrip("\n")))

    def _shorten(self, line: str) -> str:
        if self._longest is None or len(line) <= self._longest:
            return line
        return f"{line[: self._longest]} [... {len(line):,} characters in this line]"


class LineProcess:
    """A process that exchanges lines of JSON with this one; it ends with its creator's thread."""

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
        self.input: IO[bytes] = self._process.stdin
        self.output: IO[bytes] = self._process.stdout
        self._received = bytearray()
        self.is_ready = False
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def is_waited_for(self) -> bool:
        """True if the process has something to do, so that closing its input does not end it."""
        return not self.is_ready

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def take(self, chunk: bytes) -> list[Any]:
        """Append received bytes; return the decoded lines that are complete now."""
        self._received += chunk
        if b"\n" not in chunk:
            return []
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def describe_end(self) -> str:
        return f"exit status {self._process.wait()}"

    def stop(self) -> None:
        """Stop the process by closing its input; kill it if it is busy."""
        with contextlib.suppress(BrokenPipeError):  # it has died with something unread
            self.input.close()
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


class WorkerProcess(LineProcess):
    """A verifier process; `places` are the items it is grading, empty while it starts or waits."""

    def __init__(
        self, command: list[str], printed: PrintedLines, environment: Mapping[str, str]
    ) -> None:
        super().__init__(command, printed, environment)
        self.takes_many = False
        self._wants_row = False
        self.places: list[int] = []

    @property
    def is_waited_for(self) -> bool:
        return not self.is_ready or bool(self.places)

    def get_ready(self, description: dict[str, bool]) -> None:
        """Record that the verifier is loaded, and its calling convention."""
        self.is_ready, self.takes_many, self._wants_row = (
            True,
            description["takes_many"],
            description["wants_row"],
        )

    def send(self, places: list[int], items: Sequence[Item], *, time_limit: float) -> None:
        """Send items to grade; `places` are their positions in the batch."""
        grace = GRACE_SECONDS if self.takes_many else 0.0
        self.places, self.deadline = places, time.monotonic() + time_limit + grace
        request = [item if self._wants_row else item[:3] for item in items]
        with contextlib.suppress(BrokenPipeError):  # it has died; reading its output shows that
            self.input.write(json.dumps(request).encode() + b"\n")
            self.input.flush()

"""The trainer's side of worker processes: a socket to their broker.

Sending does not wait for the user's code, and receiving waits at most the given time. Nothing
runs in the trainer's own process, and no thread.
"""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from megatron_rl.runtime.processes import locked_folder

START_SECONDS = 120.0  # to import the module: on a crowded machine, sympy from a slow disk
_CLOSE_SECONDS = 15.0
_TEMPORARY = "rl_workers-"  # begins the names of their temporary folders
# Environment variables passed to workers; API keys and tokens are not.
_SEEN = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|LANG|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH|SSL_CERT_FILE"
    r"|REQUESTS_CA_BUNDLE|NO_PROXY|no_proxy|LC_\w+|PYTHON\w+|XDG_\w+_HOME|\w+_NUM_THREADS"
    r"|HF_HOME|HF_HUB_OFFLINE|TOKENIZERS_PARALLELISM|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE)"
)

Message = dict[str, Any]


def _environment(further: Sequence[str]) -> dict[str, str]:
    """Return the standard variables and those named in `further`."""
    seen = {name: value for name, value in os.environ.items()
            if _SEEN.fullmatch(name) or name in further}  # fmt: skip
    # A new interpreter finds modules in the same places as this one.
    return seen | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class FailureCounts:
    """Numbers of failures by kind, with the first text of each."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, text: str) -> None:
        """Count a failure."""
        count, first = self._found.get(kind, (0, text))
        self._found[kind] = count + 1, first

    def pop_lines(self) -> list[str]:
        """Return a line for each kind, and count from 0 again."""
        lines = [
            f"{count:,} {kind}; the first: {text}" for kind, (count, text) in self._found.items()
        ]
        self._found.clear()
        return lines


def _print(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201


def _processes_with(mark: bytes) -> list[int]:
    """Return the processes that were started with a variable that begins with `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any(one.startswith(mark) for one in variables):
                found.append(int(folder.name))
    return found


class Workers:
    """The processes of one environment or verifier; derive a class with its messages.

    broker: the module of its broker; settings: what that and the user's side read; variables: of
    this process that all processes get, too; error: the class of errors, also of a variable that is
    not set; echo: receives printed lines, or standard error.
    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        broker: str,
        settings: Message,
        *,
        variables: Sequence[str],
        error: type[Exception],
        echo: Callable[[str], object] | None,
    ) -> None:
        if missing := [name for name in variables if name not in os.environ]:
            raise error(
                f"workers.variables names {', '.join(missing)}, not set here; export it, or "
                "unname it"
            )
        self.description = Message()  # of the loaded module, after `start`
        self.last_message_at = time.monotonic()  # from the broker
        self.is_closed = False
        self.name, self._error, self._echo = settings["name"], error, echo or _print
        self._failure = ""
        self._deadline = time.monotonic() + START_SECONDS
        self._received = bytearray()
        self._resources = contextlib.ExitStack()
        self._temporary = self._resources.enter_context(
            locked_folder(Path(tempfile.gettempdir()), prefix=_TEMPORARY)
        )
        self._link, theirs = socket.socketpair()
        self._link.settimeout(START_SECONDS)
        self._arrivals = select.poll()
        self._arrivals.register(self._link, select.POLLIN)
        settings = settings | {"link": theirs.fileno(), "trainer": os.getpid()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", broker, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=_environment(variables) | {"TMPDIR": str(self._temporary)},
            start_new_session=True,
        )
        theirs.close()

    def start(self) -> None:
        """Wait until the module is loaded; raise the error if it cannot be."""
        early = []
        while not self.description:
            early += self.receive(1.0)
        assert not early, "nothing was sent"

    def note(self, text: str) -> None:
        """Print a line about these processes."""
        self._echo(f"{self.name}: {text}")

    def write(self, message: Message) -> None:
        """Send a message to the broker."""
        try:
            self._link.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._error(f"the manager of {self.name} has ended: {error}") from None

    def receive(self, timeout: float) -> list[Message]:
        """Return the messages that have arrived; wait up to `timeout` seconds for some."""
        if self._failure:
            raise self._error(self._failure)
        if self._arrivals.poll(1000 * timeout):
            self._read()
            while self._arrivals.poll(0) and not self._failure:
                self._read()
        *lines, self._received = self._received.split(b"\n")
        messages = [message for line in lines if self._is_result(message := json.loads(line))]
        if not self.description and not self._failure and time.monotonic() > self._deadline:
            self._failure = f"{self.name} did not start in {START_SECONDS:.0f} s"
        if self._failure and not messages:
            raise self._error(self._failure)
        return messages

    def close(self) -> None:
        """End all processes."""
        if self.is_closed:
            return
        self.is_closed = True
        deadline = time.monotonic() + _CLOSE_SECONDS
        try:
            self._link.shutdown(socket.SHUT_WR)
            self._link.settimeout(_CLOSE_SECONDS)
            while time.monotonic() < deadline and (chunk := self._link.recv(1 << 16)):
                self._received += chunk
            *lines, _ = self._received.split(b"\n")
            for line in lines:
                self._is_result(json.loads(line))  # prints
            self._process.wait(timeout=max(deadline - time.monotonic(), 0))
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._link.close()
        self._end_left()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self) -> None:
        try:
            chunk = self._link.recv(1 << 20)
        except ConnectionError:
            chunk = b""
        self._received += chunk
        self.last_message_at = time.monotonic()
        if not chunk:
            self._failure = f"the manager of {self.name} has ended by itself"
            self._end_left()

    def _end_left(self) -> None:
        """End what a killed manager has left: processes with its temporary folder in TMPDIR."""
        mark, deadline = f"TMPDIR={self._temporary}".encode(), time.monotonic() + _CLOSE_SECONDS
        while time.monotonic() < deadline and (left := _processes_with(mark)):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _is_result(self, message: Message) -> bool:
        """Process a message that is no result."""
        if "printed" in message:
            self.note(message["printed"])
        elif "fatal" in message:
            self._failure = self._failure or f"{self.name} {message['fatal']}"
        elif "ready" in message:
            self.description = message["ready"]
        return "key" in message

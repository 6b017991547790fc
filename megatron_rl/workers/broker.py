"""A process that manages the forks of a template: their calls, time limits and ends.

Started by `megatron_rl.workers.client` as a new interpreter with few variables. It runs none of the
user's code, so it always reads what the trainer sends, and ends everything below it when the
trainer ends. A package derives a class that receives the trainer's messages. Its own messages:
{"ready": description}, {"fatal": text}, {"printed": line}, {"alive": number of calls}.
"""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from megatron_rl.workers.template import (
    FORK_SECONDS,
    LONGEST_LINE,
    adopt_orphans,
    ignore_job_signals,
    temporary_folder,
)

CLOSE_SECONDS = 3.0  # for `close()` of an environment
EMIT_SECONDS = 0.002  # in which messages are collected: each one that is sent wakes the trainer
ALIVE_SECONDS = 1.0  # between two signs of life while calls are in progress
STOPPED_SECONDS = 2.0  # that it is late, beyond which this process has been stopped
_LEFT_SECONDS = 12.0  # for the ends of all processes when the trainer has closed the link
# For Python's resource tracker, which removes shared memory as it ends; it may have to start first.
_TRACKER_SECONDS = 5.0

Message = dict[str, Any]


class OverTimeError(Exception):
    """A call exceeded its time limit."""


class DiedError(Exception):
    """A process ended before it answered; its text is the exit status."""


class Output:
    """The reading end of a pipe to which processes print; `echo` receives its shortened lines."""

    def __init__(self, longest_line: int, echo: Callable[[str], None]) -> None:
        self._file, self.inlet = os.pipe()
        os.set_blocking(self._file, False)
        self._capacity = fcntl.fcntl(self._file, fcntl.F_GETPIPE_SZ)
        self._longest, self._echo = longest_line, echo
        self._start, self._length = b"", 0  # of the line that has not ended
        self.was_full = False  # who prints had to wait for this process
        asyncio.get_running_loop().add_reader(self._file, self.read)

    def read(self) -> bool:
        """Read once what is there; returns whether there may be more."""
        try:
            chunk = os.read(self._file, self._capacity)
        except BlockingIOError:
            return False
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._file)
        # Pages of the pipe may be filled in part.
        self.was_full |= len(chunk) >= self._capacity // 2
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._add(line)
            self._end_line()
        self._add(rest)
        return bool(chunk)

    def close(self) -> None:
        """Read what ended processes have left in the pipe, and close it."""
        self.read()
        if self._length:
            self._end_line()
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)

    def _add(self, text: bytes) -> None:
        self._start += text[: self._longest - len(self._start)]
        self._length += len(text)

    def _end_line(self) -> None:
        cut = f" [... {self._length:,} characters in this line]"
        is_cut = self._length > len(self._start)
        self._echo(self._start.decode(errors="replace") + (cut if is_cut else ""))
        self._start, self._length = b"", 0


class Unit:
    """A process forked from the template; it answers one call at a time."""

    def __init__(self, pid: int, handle: int, output: Output, *, temporary: str) -> None:
        self.pid, self._handle, self.output = pid, handle, output
        self.temporary = temporary  # folder of its temporary files
        self.ended = asyncio.Event()
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.limit = self.own_seconds = self.used_seconds = 0.0  # of the call in progress
        self.sampled, self.is_ready_to_run = 0.0, False
        self.threads: dict[int, tuple[int, int]] = {}  # by `read_threads`, when it was sampled
        self.broker_seconds = 0.0  # the same of this process
        self.calls = 0  # so far; the number of the last one is in its reply
        self._reply: asyncio.Future[Message] | None = None
        asyncio.get_running_loop().add_reader(handle, self._end)

    async def connect(self, channel: socket.socket) -> None:
        """Use the process's socket."""
        self._source, self._sink = await asyncio.open_connection(sock=channel, limit=LONGEST_LINE)
        self._reading = asyncio.create_task(self._read())

    @property
    def has_left_files(self) -> bool:
        """True if it has temporary files, or has removed their folder."""
        try:
            return bool(os.listdir(self.temporary))
        except OSError:
            return True

    @property
    def is_busy(self) -> bool:
        return self._reply is not None and not self._reply.done()

    async def call(self, request: Message, *, limit: float) -> Message:
        """Return the reply; raises OverTimeError or DiedError, and then the process is of no use.

        limit: seconds of its own work (`Clock`), from now on.
        """
        self.calls += 1
        self.limit, self.own_seconds, self.used_seconds = limit, 0.0, 0.0
        self.sampled, self.broker_seconds = time.monotonic(), seconds_of_broker()
        self.output.was_full = False
        self._reply = asyncio.get_running_loop().create_future()
        if self.ended.is_set():
            self._reply.set_exception(DiedError())
        else:
            self._sink.write(json.dumps(request | {"number": self.calls}).encode() + b"\n")
        try:
            return await self._reply
        except DiedError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    raise DiedError(f"exit status {await asyncio.shield(self.status)}") from None
            raise DiedError("exit status unknown") from None

    def time_out(self) -> None:
        """End the call in progress: its time is up."""
        self._fail(OverTimeError())

    async def kill(self) -> None:
        """End the process, and wait for its end."""
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        await self.ended.wait()
        self._reading.cancel()
        self._sink.close()
        self.output.close()

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self.ended.set()
        # What it has written before its end is read first.
        asyncio.get_running_loop().call_later(0.01, self._fail, DiedError())

    async def _read(self) -> None:
        line = b"\n"
        while line:
            # Its code may write anything to any file descriptor.
            with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                line = await self._source.readline()
                reply = json.loads(line)
                if reply["number"] == self.calls and self._reply and not self._reply.done():
                    self._reply.set_result(reply)


class Broker:
    """Derive a class with `take` and start it by `main`."""

    def __init__(self, link: socket.socket, settings: Message) -> None:
        self.settings, self.description = settings, Message()
        self._link = link
        self._units: set[Unit] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._forking = asyncio.Lock()
        self._fds: list[int] = []
        self._outgoing = bytearray()  # messages to the trainer
        self._lines = 0  # printed since `renew`
        self._has_left = asyncio.Event()  # an ended process may have left others
        self._left_folders: list[str] = []  # of temporary files of ended processes
        self._sessions = {os.getsid(0)}  # of processes that the module has started at its import
        self._forks = itertools.count()

    def on_message(self, message: Message) -> None:
        """Receive a message of the trainer."""
        raise NotImplementedError

    async def close(self) -> None:
        """Wait for what may end in order when the trainer has closed the link."""

    @classmethod
    def main(cls) -> None:
        """Run until the trainer closes the link or ends."""
        settings = json.loads(sys.argv[1])
        ignore_job_signals()
        adopt_orphans()
        settings["files"], hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two for each process
        link = socket.socket(fileno=settings["link"])
        link.set_inheritable(False)
        asyncio.run(cls(link, settings).run())
        os._exit(0)

    async def run(self) -> None:
        """Serve the trainer, then end all processes."""
        loop = asyncio.get_running_loop()
        source, self._sink = await asyncio.open_connection(sock=self._link, limit=LONGEST_LINE)
        self._start_template()
        try:
            handle = os.pidfd_open(self.settings["trainer"])
            loop.add_reader(handle, self._abandon, source, handle)
        except ProcessLookupError:  # it has ended: the link ends, too
            pass
        except OSError as error:
            self.emit({"fatal": f"needs pidfd_open, of Linux 5.3 and later ({error})"})
        if not children_of(os.getpid()):  # the template is one
            self.emit({"fatal": "needs /proc/PID/task/TID/children (CONFIG_PROC_CHILDREN)"})
        with contextlib.suppress(ConnectionError):
            for forever in (self._watch_calls(), self._sweep()):
                self.start(forever)
            while line := await source.readline():
                message = json.loads(line)
                if "renew" in message:
                    self._renew()
                else:
                    self._on_message(message)
            await self.close()
        if self._template.poll() is None:
            self._template.kill()  # the kernel ends its forks with it
        self._template.wait()
        self._sessions.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._end_left(), _LEFT_SECONDS)
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
        with contextlib.suppress(ConnectionError):
            self._output.close()
            self._renew()
            self._flush()
            self._sink.close()
            await self._sink.wait_closed()

    def _on_message(self, message: Message) -> None:
        try:
            self.on_message(message)
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            self._report(error)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background; an error of this module's own ends the process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def emit(self, message: Message) -> None:
        """Send a message to the trainer, if it is still there."""
        if not self._outgoing:
            asyncio.get_running_loop().call_later(EMIT_SECONDS, self._flush)
        self._outgoing += json.dumps(message).encode() + b"\n"

    def _flush(self) -> None:
        if self._outgoing and not self._sink.is_closing():
            self._sink.write(bytes(self._outgoing))
        self._outgoing.clear()

    async def spawn(self) -> Unit:
        """Fork a process."""
        fork = asyncio.get_running_loop().create_task(self._fork())
        try:
            return await asyncio.shield(fork)
        except asyncio.CancelledError:  # the conversation is over before its process exists
            fork.add_done_callback(self._end_fork)
            raise

    def _end_fork(self, fork: "asyncio.Task[Unit]") -> None:
        if not fork.cancelled() and fork.exception() is None:
            self.start(self.end(fork.result()))

    async def _fork(self) -> Unit:
        ours, theirs = socket.socketpair()
        output = Output(self.settings["longest_line"], self._print)
        async with self._forking:
            self._forked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            socket.send_fds(self._control, [b"f"], [theirs.fileno(), output.inlet])
            theirs.close()
            os.close(output.inlet)
            try:
                pid = await asyncio.wait_for(self._forked, 2 * FORK_SECONDS)
            except TimeoutError:
                raise TimeoutError(f"no process was forked in {2 * FORK_SECONDS:.0f} s") from None
            folder = temporary_folder(os.environ["TMPDIR"], next(self._forks))
            unit = Unit(pid, self._fds.pop(0), output, temporary=folder)
            self._sessions.discard(pid)  # the number of one that has ended
            self._units.add(unit)
        await unit.connect(ours)
        return unit

    async def end(self, unit: Unit) -> None:
        """End a process and all that it started."""
        await unit.kill()
        self._units.discard(unit)
        self._left_folders.append(unit.temporary)
        self._has_left.set()

    def _finish(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(error)

    def _report(self, error: BaseException) -> None:
        self.emit({"fatal": f"failed in its manager: {type(error).__name__}: {error}"})

    def _abandon(self, source: asyncio.StreamReader, handle: int) -> None:
        """End without waiting for anything: the trainer has ended."""
        asyncio.get_running_loop().remove_reader(handle)
        self._template.kill()
        source.feed_eof()  # whoever else has a copy of the socket

    def _start_template(self) -> None:
        self._control, theirs = socket.socketpair()
        self._output = Output(self.settings["longest_line"], self._print)
        inlet = self._output.inlet
        settings = self.settings | {"control": theirs.fileno(), "parent": os.getpid()}
        self._template = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.workers.template", json.dumps(settings)],
            stdin=subprocess.DEVNULL, stdout=inlet, stderr=inlet, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        os.close(inlet)
        self._told = b""
        asyncio.get_running_loop().add_reader(self._control, self._read_template)

    def _read_template(self) -> None:
        """Read the template's messages; each of its forks comes with a pidfd."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 8)
        except ConnectionError:
            data, fds = b"", []
        self._fds += fds
        *lines, self._told = (self._told + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "pid" in message:
                self._forked.set_result(message["pid"])
            elif "ended" in message:
                for unit in [one for one in self._units if one.pid == message["ended"]]:
                    if not unit.status.done():
                        unit.status.set_result(message["status"])
            elif "ready" in message:
                found = map(session_of, descendants_of(os.getpid()))
                self._sessions |= {one for one in found if one is not None}
                self.description = message["ready"]
                self.emit(message)
            else:
                self.emit({"fatal": f"did not start:\n{message['error']}"})
        if not data:
            asyncio.get_running_loop().remove_reader(self._control)
            status = self._template.wait()
            what = "ended by itself" if self.description else "did not start"
            self.emit({"fatal": f"{what} (exit status {status}); the log has its output"})

    async def _watch_calls(self) -> None:
        """End calls whose own time is up, and report to the trainer that others are in progress."""
        reported_at, due_at = 0.0, time.monotonic()
        while True:
            calls = [unit for unit in self._units if unit.is_busy]
            tick = min(max(min((one.limit for one in calls), default=1.0) / 8, 0.02), 1.0)
            now = time.monotonic()
            # This process was stopped, as all of a suspended job is: its calls used no time.
            if (stopped := now - due_at) > STOPPED_SECONDS:
                for unit in calls:
                    unit.sampled = min(unit.sampled + stopped, now)
            for unit in calls:
                if now - unit.sampled >= tick:
                    measure(unit, now=now)
                    if unit.own_seconds > unit.limit and not unit.is_ready_to_run:
                        unit.time_out()
            if calls and now - reported_at > ALIVE_SECONDS:
                reported_at = now
                self.emit({"alive": len(calls)})
            due_at = now + tick
            await asyncio.sleep(tick)

    async def _sweep(self) -> None:
        while True:
            await self._has_left.wait()
            self._has_left.clear()
            folders, self._left_folders = self._left_folders, []
            await self._end_left()
            for folder in folders:
                try:
                    os.rmdir(folder)  # most are empty
                except OSError:
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _end_left(self) -> None:
        """Kill what ended processes have left, which are children of this one, until none is.

        What the module has started at its import, such as a server, is of none of their sessions.
        """
        began = time.monotonic()
        while True:
            left, has_ended = [], False
            for pid in set(children_of(os.getpid())) - {self._template.pid}:
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG) != (0, 0):
                        has_ended = True  # its own children have come here since the list was read
                    elif session_of(pid) not in self._sessions:
                        left.append(pid)
            if not left and not has_ended:
                return
            is_patient = time.monotonic() < began + _TRACKER_SECONDS
            for pid in left:
                if not (is_patient and _is_resource_tracker(pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)

    def _renew(self) -> None:
        """Pass on as many lines again, after the number of those that were left out."""
        if (left_out := self._lines - self.settings["most_lines"]) > 0:
            self.emit({"printed": f"{left_out:,} more lines are not shown"})
        self._lines = 0

    def _print(self, line: str) -> None:
        self._lines += 1
        if self._lines <= self.settings["most_lines"]:
            self.emit({"printed": line})


def children_of(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_bytes()
                found += map(int, text.split())
    return found


def descendants_of(pid: int) -> list[int]:
    """Return the children of a process, theirs, and so on."""
    found = children_of(pid)
    for one in found:
        found += children_of(one)
    return found


def session_of(pid: int) -> int | None:
    """Return the session of a process; None if it has ended."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


def read_threads(pid: int) -> dict[int, tuple[int, int]]:
    """Return the nanoseconds that each thread ran and waited for a core; empty if unknown."""
    threads = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_bytes()
            ran, waited, _ = map(int, text.split())
            threads[int(thread)] = (ran, waited)
    return threads


def seconds_of_broker() -> float:
    """Return the seconds in which this process ran or waited for a core, and so did not read."""
    with contextlib.suppress(OSError), open("/proc/self/schedstat", "rb", buffering=0) as file:
        ran, waited, _ = map(int, file.read().split())
        return (ran + waited) / 1e9
    return 0.0  # unknown


def measure(unit: Unit, *, now: float) -> None:
    """Add to a call's own seconds the seconds since the last time.

    They are the interval without the longest time that a thread of it was ready and waited for a
    core, so that what else runs on the machine does not count; but at least the processor time that
    it used, in parts of all cores, so that starting threads gains nothing. If it filled the pipe to
    which it prints, the time in which this process did not read, for want of a core or because of
    other work, does not count, either.
    """
    interval, pids = now - unit.sampled, [unit.pid]
    threads: dict[int, tuple[int, int]] = {}
    for pid in pids:
        threads |= read_threads(pid)
        pids += children_of(pid)
    ran, waited = 0, [0]
    for thread, (run, wait) in threads.items():
        before = unit.threads.get(thread, (0, 0))
        ran += run - before[0]
        waited.append(wait - before[1])
    # The kernel adds a wait when it is over, so it may be of the last interval, too; but nothing
    # from before the call counts.
    unit.used_seconds += min(ran / 1e9 / (os.cpu_count() or 1), interval)
    broker = seconds_of_broker()
    printing = (broker - unit.broker_seconds) if unit.output.was_full else 0.0
    unit.broker_seconds, unit.output.was_full = broker, False
    waiting = min(max(waited) / 1e9 + printing, unit.own_seconds + interval)
    unit.own_seconds = max(unit.own_seconds + interval - waiting, unit.used_seconds)
    unit.is_ready_to_run = not ran and any(map(_is_ready_to_run, threads))
    unit.threads, unit.sampled = threads, now


def _is_ready_to_run(thread: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{thread}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"R"
    return False


def _is_resource_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False

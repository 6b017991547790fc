"""The thread that runs the environment processes of a pool."""

import os
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from megatron_rl.environments.interface import (
    Answer,
    BrokenEnvironmentError,
    EnvironmentFailure,
    FailureKind,
)
from megatron_rl.environments.journal import Journal
from megatron_rl.environments.process import Conversation, EnvironmentProcess, Turn
from megatron_rl.rewards.process import START_SECONDS

READ_BYTES = 1 << 16
CONCURRENT = 64  # calls in progress per process; an async environment waits for all of them at once
MAX_IDLE_DEATHS = 3  # of processes without a call


@dataclass
class Dispatcher:
    """Runs in a thread of its own; `commands` come in and `results` go out by queues.

    A call that exceeds the time limit ends its process, because nothing else interrupts C code or a
    blocking call. The other conversations of the process are made again in a new one by replaying
    their turns. If several calls were in progress, each is tried alone to find the one to blame.
    """

    start_process: Callable[[], EnvironmentProcess]
    name: str
    workers: int
    time_limit: float
    echo: Callable[[str], object]
    commands: "SimpleQueue[tuple[str, tuple[Any, ...]]]" = field(default_factory=SimpleQueue)
    # (key, result); key -1: a process is ready, or the error that ended the thread
    results: "SimpleQueue[tuple[int, Any]]" = field(default_factory=SimpleQueue)
    _conversations: dict[int, Conversation] = field(default_factory=dict)
    _homes: dict[int, EnvironmentProcess] = field(default_factory=dict)
    _journal: Journal | None = None
    _idle_deaths: int = 0
    _is_closing: bool = False

    def __post_init__(self) -> None:
        self._wake_up, self._bell = os.pipe()
        os.set_blocking(self._wake_up, False)
        self._processes: list[EnvironmentProcess] = []
        self._answers_late = False

    def command(self, kind: str, *arguments: Any) -> None:
        """Pass a command to the thread: begin, send, end or close."""
        self.commands.put((kind, arguments))
        os.write(self._bell, b".")

    def run(self) -> None:
        """Run until the command `close`; an error becomes a result, and ends the processes."""
        try:
            self._processes = [self.start_process() for _ in range(self.workers)]
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_up, selectors.EVENT_READ)
                while not self._is_closing:
                    self._step(selector)
        except Exception as error:  # noqa: BLE001 - raised by `poll`
            self.results.put((-1, error))
        finally:
            self._use_journal(None)
            for process in self._processes:
                process.stop()

    def close_pipes(self) -> None:
        """Close the pipe that wakes the thread, after the thread has ended."""
        os.close(self._wake_up)
        os.close(self._bell)

    def _step(self, selector: selectors.BaseSelector) -> None:
        for process in self._processes:
            process.hand_out(most=CONCURRENT)
            if process.output not in selector.get_map():
                selector.register(process.output, selectors.EVENT_READ, process)
            if process.wants_to_write and process.input not in selector.get_map():
                selector.register(process.input, selectors.EVENT_WRITE, process)
        deadline = min(one.next_deadline(self.time_limit) for one in self._processes)
        patience = None if deadline == float("inf") else max(deadline - time.monotonic(), 0)
        for key, events in selector.select(patience):
            if key.data is None:
                self._take_commands()
            elif events & selectors.EVENT_WRITE:
                key.data.flush()
                if not key.data.wants_to_write:
                    selector.unregister(key.fileobj)
            elif key.data in self._processes:
                self._read(key.data, selector)
        for process in list(self._processes):
            if time.monotonic() > process.next_deadline(self.time_limit):
                self._end_late(process, selector)

    def _take_commands(self) -> None:
        os.read(self._wake_up, READ_BYTES)
        while not self.commands.empty():
            kind, arguments = self.commands.get()
            match kind:
                case "journal":
                    self._use_journal(*arguments)
                case "begin":
                    self._begin(*arguments)
                case "send":
                    self._send(*arguments)
                case "end":
                    self._end(*arguments)
                case "close":
                    self._is_closing = True

    def _use_journal(self, journal: Journal | None) -> None:
        if self._journal is not None:
            self._journal.close()
        self._journal = journal

    def _begin(self, key: int, place: int, row: str, seed: int) -> None:
        self._conversations[key] = Conversation(key, place, row, seed)

    def _send(self, key: int, message: str, tokens: dict[str, Any] | None) -> None:
        conversation = self._conversations[key]
        conversation.turns.append(Turn(message, tokens=tokens))
        if self._journal is not None and self._journal.answer(conversation):
            self.results.put((key, Answer(**(conversation.turns[-1].answer or {}))))
            return
        home = self._homes.get(key)
        if home is None:
            home = self._homes[key] = min(self._processes, key=lambda one: one.load)
        home.waiting.append(conversation)

    def _end(self, key: int) -> None:
        conversation = self._conversations.pop(key)
        home = self._homes.pop(key, None)
        if home is not None:
            home.forget(conversation)

    def _read(self, process: EnvironmentProcess, selector: selectors.BaseSelector) -> None:
        chunk = os.read(process.output.fileno(), READ_BYTES)
        if not chunk:
            self._end_dead(process, selector)
            return
        for line in process.take(chunk):
            if "started" in line:
                process.start_call(line["started"])
            elif "error" in line:
                raise BrokenEnvironmentError(f"{self.name} did not start:\n{line['error']}")
            elif "ready" in line:
                process.is_ready, self._answers_late = True, line["ready"]["answers_late"]
                self.results.put((-1, line["ready"]))
            else:
                self._finish(process.finish(line["key"]), line)

    def _finish(self, conversation: Conversation, line: dict[str, Any]) -> None:
        self._idle_deaths = 0
        if "failure" in line:
            if line["trace"]:
                self.echo(line["trace"])
            self._fail(conversation, line["failure"], line["text"])
            return
        turn = conversation.turns[-1]
        turn.answer, turn.timed_out, conversation.deaths = line["answer"], line["timed_out"], 0
        if self._journal is not None:
            self._journal.add(conversation)
        self.results.put((conversation.key, Answer(**line["answer"])))

    def _fail(self, conversation: Conversation, kind: FailureKind, text: str) -> None:
        if kind == "timed_out":
            text = f"the call took longer than {self.time_limit:g} s"
        number = len(conversation.turns)
        verb = "did not answer" if kind == "timed_out" else "failed in"
        verb = "lost its infrastructure in" if kind == "lost" else verb
        home = self._homes.pop(conversation.key, None)
        if home is not None:
            home.forget(conversation)
        failure = EnvironmentFailure(kind, f"{self.name} {verb} turn {number}: {text}")
        self.results.put((conversation.key, failure))

    def _end_late(self, process: EnvironmentProcess, selector: selectors.BaseSelector) -> None:
        if not process.is_ready:
            raise BrokenEnvironmentError(f"{self.name} did not start in {START_SECONDS:.0f} s")
        started = self._started(process)
        new = self._replace(process, selector)
        if len(started) != 1:
            new.alone.extendleft(reversed(started))
            return
        (late,) = started
        turn = late.turns[-1]
        if self._answers_late and not turn.timed_out:
            turn.timed_out = True  # answered by `timed_out`
            new.alone.appendleft(late)
        else:
            self._fail(late, "timed_out", "")

    def _end_dead(self, process: EnvironmentProcess, selector: selectors.BaseSelector) -> None:
        end = process.describe_end()
        if not process.is_ready:
            raise BrokenEnvironmentError(
                f"{self.name} did not start ({end}); the log has its output"
            )
        started = self._started(process)
        new = self._replace(process, selector)
        if not process.started:
            self._idle_deaths += 1
            if self._idle_deaths > MAX_IDLE_DEATHS:
                raise BrokenEnvironmentError(f"a process of {self.name} ended by itself ({end})")
        if len(started) == 1:
            started[0].deaths += 1
            if started[0].deaths == 2:  # once, it may be killed because the machine lacks memory
                self._fail(started.pop(), "failed", f"its process died twice, {end}")
        new.alone.extendleft(reversed(started))

    def _started(self, process: EnvironmentProcess) -> list[Conversation]:
        """Return the conversations with a call in progress, but those that were ended meanwhile."""
        return [process.sent[key] for key in process.started if key in self._conversations]

    def _replace(
        self, process: EnvironmentProcess, selector: selectors.BaseSelector
    ) -> EnvironmentProcess:
        """Start a new process with the turns that wait, except those whose call had begun."""
        for pipe in (process.output, process.input):
            if pipe in selector.get_map():
                selector.unregister(pipe)
        process.kill()
        new = self.start_process()
        self._processes[self._processes.index(process)] = new
        not_begun = [one for key, one in process.sent.items() if key not in process.started]
        new.waiting.extend([*not_begun, *process.waiting])
        new.alone.extend(process.alone)
        for key, home in self._homes.items():
            if home is process:
                self._homes[key] = new
        return new

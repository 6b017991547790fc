"""Environments in worker processes, with a hard time limit for each call.

What a model writes can make a tool run for hours, use all memory or end its process. A process that
exceeds the limit is killed, its conversation gets a failure, and the others go on unchanged.
"""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty
from typing import Any, Literal, Self

from megatron_rl.environments.dispatcher import Dispatcher
from megatron_rl.environments.interface import (
    Answer,
    BrokenEnvironmentError,
    EnvironmentFailure,
    TurnTokens,
)
from megatron_rl.environments.journal import Journal
from megatron_rl.environments.process import EnvironmentProcess
from megatron_rl.rewards.process import PrintedLines, worker_environment
from megatron_rl.rewards.verifier import VerifierError

OnError = Literal["end", "zero"]
Result = tuple[int, Answer | EnvironmentFailure]
_LONGEST_LINE = 500  # characters of a printed line
_MAX_LINES = 1000  # printed lines of all workers


class EnvironmentPool:
    """Worker processes that answer the turns of conversations, kept for all steps.

    time_limit_seconds: limit of one call. on_error: reaction to an environment that fails. `end`
    raises BrokenEnvironmentError; `zero` returns the failure. Failures of kind `timed_out` and
    `lost` are always returned. variables: names of environment variables for the workers in
    addition to the standard ones. max_rewrites: times that a conversation may restart. echo:
    receives what environments print, and tracebacks. Use it as a context manager, or call `close`.
    One thread at a time may use it. Raises BrokenEnvironmentError if a variable is not set.
    """

    def __init__(
        self,
        name: str,
        *,
        workers: int,
        time_limit_seconds: float,
        on_error: OnError = "end",
        variables: Sequence[str] = (),
        max_rewrites: int = 0,
        echo: Callable[[str], object] = lambda line: print(line, file=sys.stderr),  # noqa: T201
    ) -> None:
        if workers < 1 or time_limit_seconds <= 0:
            raise ValueError(f"need workers >= 1 and a time limit > 0, got {workers}, "
                             f"{time_limit_seconds}")  # fmt: skip
        try:
            values = worker_environment(variables, setting="environment.variables")
        except VerifierError as error:
            raise BrokenEnvironmentError(str(error)) from None
        self.name, self.on_error, self.max_rewrites = name, on_error, max_rewrites
        self.tools: list[dict[str, Any]] = []  # JSON schemas, after `start`
        self.takes_tokens = False  # whether environments have `receive_tokens`, after `start`
        self.answered = 0  # total number of results, to detect progress
        self._not_ready, self._is_closed = workers, False
        self._numbers = itertools.count()
        self._journal: Path | None = None
        # A key is never used again, so that no answer goes to a later conversation at its place.
        self._keys: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self.note = _limited(name, echo)  # a line for the log
        self._printed = PrintedLines(self.note, longest=_LONGEST_LINE)
        command = [
            *(sys.executable, "-m", "megatron_rl.environments.worker", "--environment", name),
            *("--time-limit", str(time_limit_seconds), "--parent", str(os.getpid())),
            *("--max-rewrites", str(max_rewrites)),
        ]
        self._dispatcher = Dispatcher(
            lambda: EnvironmentProcess(command, self._printed, values),
            name, workers=workers, time_limit=time_limit_seconds, echo=echo,
        )  # fmt: skip
        # The kernel ends a worker with the thread that started it, which lives as long as the pool.
        self._thread = threading.Thread(
            target=self._dispatcher.run, name="environments", daemon=True
        )
        self._thread.start()

    def start(self) -> None:
        """Wait until every worker has loaded the environment; raise if one fails."""
        while self._not_ready:
            self._take(None)

    def use_journal(self, folder: Path | None) -> None:
        """Record answers in a folder from now on, and take those that it has; None: stop."""
        if folder != self._journal:
            self._journal = folder
            self._dispatcher.command("journal", None if folder is None else Journal(folder))

    def begin(self, place: int, row: str, seed: int) -> None:
        """Begin a conversation; place: its index in the call; row: the prompt set's row as JSON."""
        key = self._keys[place] = next(self._numbers)
        self._places[key] = place
        self._dispatcher.command("begin", key, place, row, seed)

    def send(self, place: int, message: str, tokens: TurnTokens | None = None) -> None:
        """Send a turn of the policy; `poll` returns the answer later."""
        fields = vars(tokens) if tokens is not None and self.takes_tokens else None
        self._dispatcher.command("send", self._keys[place], message, fields)

    def poll(self, timeout: float) -> list[Result]:
        """Return the answers that have arrived; wait up to `timeout` seconds for the first."""
        deadline = time.monotonic() + timeout
        results: list[Result] = []
        try:
            while not results:
                results += self._take(max(deadline - time.monotonic(), 0.0))
            while True:
                results += self._take(0.0)
        except Empty:
            self.answered += len(results)
            return results

    def end(self, place: int) -> None:
        """End a conversation and drop its environment; an answer on its way is ignored."""
        key = self._keys.pop(place)
        del self._places[key]
        self._dispatcher.command("end", key)

    def close(self) -> None:
        """Stop the workers."""
        if self._is_closed:
            return
        self._is_closed = True
        self._dispatcher.command("close")
        self._thread.join()
        self._dispatcher.close_pipes()
        self._printed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self, timeout: float | None) -> list[Result]:
        """Take one result off the queue; raises Empty after `timeout` seconds."""
        key, result = self._dispatcher.results.get(timeout=timeout)
        if isinstance(result, Exception):
            self._dispatcher.results.put((key, result))  # for the next call, too
            raise result
        if key < 0:
            self._not_ready = max(self._not_ready - 1, 0)
            self.tools, self.takes_tokens = result["tools"], result["takes_tokens"]
            return []
        place = self._places.get(key)
        if place is None:  # ended meanwhile
            return []
        kind = result.kind if isinstance(result, EnvironmentFailure) else None
        if kind in ("failed", "rewritten") and self.on_error == "end":
            raise BrokenEnvironmentError(result.text)
        return [(place, result)]


def _limited(name: str, echo: Callable[[str], object]) -> Callable[[str], object]:
    """Return a function that passes on the first lines about environments, or printed by them."""
    count = 0

    def pass_on(line: str) -> None:
        nonlocal count
        count += 1
        if count <= _MAX_LINES:
            echo(f"{name}: {line}")
        elif count == _MAX_LINES + 1:
            echo(f"{name}: printed {_MAX_LINES:,} lines; further lines are not shown")

    return pass_on

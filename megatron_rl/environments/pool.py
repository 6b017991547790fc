"""Environments in worker processes, one for each conversation, with a time limit for each call.

What a model writes can make a tool run for hours, use all memory or end its process. That is a
failure of its own conversation; no other conversation is delayed, repeated or changed.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.config.sections import EnvironmentSection, WorkersSection
from megatron_rl.environments.interface import (
    FAILURE_REASONS,
    Answer,
    BrokenEnvironmentError,
    EnvironmentFailure,
    TurnTokens,
)
from megatron_rl.workers.client import FailureCounts, Workers

Result = tuple[int, Answer | EnvironmentFailure]


class EnvironmentPool(Workers):
    """The environments of conversations.

    echo: receives what environments print, and tracebacks. One thread at a time may use it.
    """

    def __init__(
        self,
        settings: EnvironmentSection,
        workers: WorkersSection | None = None,
        *,
        echo: Callable[[str], object] | None = None,
    ) -> None:
        self.settings, workers = settings, workers or WorkersSection()
        self._failures = FailureCounts()  # since the last `report_failures`
        self.answered = 0  # total number of results, to detect progress
        self._numbers = itertools.count()
        self._journal: Path | None = None
        # A key is never used again, so that no answer goes to a later conversation at its place.
        self._keys: dict[int, int] = {}
        self._places: dict[int, int] = {}
        super().__init__(
            "megatron_rl.environments.broker",
            {
                "load": "megatron_rl.environments.worker:load",
                "name": settings.name,
                "time_limit": settings.time_limit_seconds,
                "on_error": settings.on_error,
                "max_rewrites": settings.max_rewrites,
                "memory_gib": workers.memory_gib,
                "longest_line": 500,
                "most_lines": 1000,
            },
            variables=workers.variables,
            error=BrokenEnvironmentError,
            echo=echo,
        )

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools, after `start`; none of an environment that has failed."""
        tools: list[dict[str, Any]] = self.description.get("tools", [])
        return tools

    def use_journal(self, folder: Path | None) -> None:
        """Record results in a folder from now on, and reuse the results that it has; None: stop."""
        if folder != self._journal:
            self._journal = folder
            self.write({"journal": None if folder is None else str(folder.resolve())})

    def begin(self, place: int, row: str, seed: int) -> None:
        """Begin a conversation; place: its index in the call; row: the prompt set's row as JSON."""
        key = self._keys[place] = next(self._numbers)
        self._places[key] = place
        self.write({"begin": key, "place": place, "row": row, "seed": seed})

    def send(self, place: int, message: str, tokens: TurnTokens | None = None) -> None:
        """Send a turn of the policy; `poll` returns the answer later."""
        self.start()
        takes_tokens = self.description["takes_tokens"]
        fields = vars(tokens) if tokens is not None and takes_tokens else None
        self.write({"send": self._keys[place], "message": message, "tokens": fields})

    def poll(self, timeout: float) -> list[Result]:
        """Return the answers that have arrived; wait up to `timeout` seconds for the first.

        Raises BrokenEnvironmentError for a failure with `on_error="end"`. Failures of kind
        `timed_out` and `lost` are always returned.
        """
        deadline = time.monotonic() + timeout
        results: list[Result] = []
        while True:
            for message in self.receive(max(deadline - time.monotonic(), 0.0)):
                place = self._places.get(message["key"])
                if place is not None:  # else it was ended meanwhile
                    results.append((place, self._result(message)))
            if results or time.monotonic() >= deadline:
                self.answered += len(results)
                return results

    def end(self, place: int) -> None:
        """End a conversation and all its processes; an answer on its way is ignored."""
        key = self._keys.pop(place)
        del self._places[key]
        self.write({"end": key})

    def count(self, failure: EnvironmentFailure) -> None:
        """Count a failure for `report_failures`."""
        self._failures.add(f"conversations: {FAILURE_REASONS[failure.kind]}", failure.text)

    def report_failures(self) -> None:
        """Print how many conversations have failed since the last call, and why, by kind."""
        for line in self._failures.pop_lines():
            self.note(line)

    def _result(self, message: dict[str, Any]) -> Answer | EnvironmentFailure:
        if "answer" in message:
            return Answer(**message["answer"])
        failure = EnvironmentFailure(message["failure"], message["text"])
        self.count(failure)
        if failure.kind in ("failed", "rewritten") and self.settings.on_error == "end":
            raise BrokenEnvironmentError(failure.text)
        return failure

"""The parent's side of an environment process and of its conversations."""

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.rewards.process import GRACE_SECONDS, LineProcess, PrintedLines

Message = dict[str, Any]


@dataclass
class Turn:
    """A turn of the policy; `answer` is None until the environment has answered."""

    message: str
    answer: Message | None = None
    timed_out: bool = False
    tokens: Message | None = None  # the fields of a `TurnTokens`

    def to_json(self) -> Message:
        """Return the turn as a worker reads it."""
        return dict(vars(self))


@dataclass(eq=False)
class Conversation:
    """All that a new environment of the conversation needs: row, seed and the turns so far.

    key: its number among all conversations of the pool; place: its index in the call.
    """

    key: int
    place: int
    row: str
    seed: int
    turns: list[Turn] = field(default_factory=list)
    deaths: int = 0  # of processes in which this was the only call


class EnvironmentProcess(LineProcess):
    """A worker process with the environments of the conversations in `environments`.

    waiting: conversations whose turn was not sent yet; alone: those that have to be answered with
    no other call in progress, because one of them ended or blocked an earlier process.
    """

    def __init__(
        self, command: list[str], printed: PrintedLines, environment: Mapping[str, str]
    ) -> None:
        super().__init__(command, printed, environment)
        os.set_blocking(self.input.fileno(), False)
        self.environments: set[int] = set()
        self.waiting: deque[Conversation] = deque()
        self.alone: deque[Conversation] = deque()
        self.sent: dict[int, Conversation] = {}
        self.started: dict[int, float] = {}  # when a call of a sent turn began
        self._one_alone = False
        self._unwritten = bytearray()

    @property
    def is_waited_for(self) -> bool:
        return not self.is_ready or bool(self.sent)

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unwritten)

    @property
    def load(self) -> int:
        """Number of conversations with an environment here or a turn that waits."""
        return len(self.environments) + len(self.alone) + len(self.waiting)

    def next_deadline(self, time_limit: float) -> float:
        """Time of the next call that exceeds the limit, or of the end of the start."""
        if not self.is_ready:
            return self.deadline
        return min(self.started.values(), default=float("inf")) + time_limit + GRACE_SECONDS

    def hand_out(self, *, most: int) -> None:
        """Send turns that wait, at most so many at once; one by one while any must be alone."""
        if not self.is_ready or (self.sent and (self.alone or self._one_alone)):
            return
        self._one_alone = bool(self.alone)
        if self.alone:
            self._send_turn(self.alone.popleft())
            return
        while self.waiting and len(self.sent) < most:
            self._send_turn(self.waiting.popleft())

    def forget(self, conversation: Conversation) -> None:
        """Drop the environment of a conversation, and its turn if that was not sent yet."""
        for queue in (self.waiting, self.alone):
            if conversation in queue:
                queue.remove(conversation)
        if conversation.key in self.environments:
            self.environments.discard(conversation.key)
            self._write({"end": conversation.key})

    def start_call(self, key: int) -> None:
        """Record that a call began."""
        self.started[key] = time.monotonic()

    def finish(self, key: int) -> Conversation:
        """Remove a turn that the process has answered, and return its conversation."""
        self.started.pop(key, None)
        return self.sent.pop(key)

    def flush(self) -> None:
        """Write as much as the pipe takes."""
        try:
            while self._unwritten:
                del self._unwritten[: os.write(self.input.fileno(), self._unwritten)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it has died; reading its output shows that
            self._unwritten.clear()

    def _send_turn(self, conversation: Conversation) -> None:
        key = conversation.key
        self.sent[key] = conversation
        if key in self.environments:
            self._write({"key": key, "turns": [conversation.turns[-1].to_json()]})
            return
        self.environments.add(key)
        turns = [turn.to_json() for turn in conversation.turns]
        self._write(
            {"key": key, "row": conversation.row, "seed": conversation.seed, "turns": turns}
        )

    def _write(self, request: Message) -> None:
        self._unwritten += json.dumps(request).encode() + b"\n"
        self.flush()

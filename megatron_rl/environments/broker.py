"""The manager of conversations: what happens in one has no effect on any other.

From the trainer: {"begin": key, "place": 0, "row": "{...}", "seed": 7}, {"send": key, "message":
text, "tokens": `TurnTokens` or null}, {"end": key}, {"journal": folder or null}. To it, with the
key: the fields of an "answer", or a "failure" with its "text".
"""

import asyncio
import contextlib
import hashlib
import json
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.environments.interface import FailureKind
from megatron_rl.workers.broker import (
    CLOSE_SECONDS,
    Broker,
    DiedError,
    Message,
    OverTimeError,
    Unit,
)


@dataclass
class Turn:
    """A turn of the policy; `result` is None until there is one, and then goes to the trainer."""

    message: str
    tokens: Message | None
    digest: str  # of place, row, seed and all messages so far
    is_late: bool = False  # answered by `timed_out`
    result: Message | None = None


@dataclass(eq=False)
class Conversation:
    """A conversation: what a new environment of it needs, and its present process."""

    key: int
    row: str
    seed: int
    digest: Any  # a hash to which each message is added, so that hashing is linear in turns
    turns: list[Turn] = field(default_factory=list)
    unit: Unit | None = None
    call: "asyncio.Task[None] | None" = None
    deaths: int = 0  # of processes since the last answer

    def add(self, message: str, tokens: Message | None) -> Turn:
        """Append a turn of the policy."""
        self.digest.update(json.dumps(message).encode() + b"\n")
        self.turns.append(Turn(message, tokens, self.digest.hexdigest()))
        return self.turns[-1]


class FailedError(Exception):
    """The end of a conversation: a failure's kind and text."""

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Journal:
    """A folder whose files are read once, and a new file in it for further results.

    A resumed run generates the same turns again, and each that had a result gets that of the
    journal, so that no side effect is repeated. All engines of a run share a folder, so a
    conversation may continue on another engine. Lines are written one by one and not synced: they
    survive the process, not a power failure. What is no result is ignored, such as a line that was
    cut, and its call is made again.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, Message] = {}  # of earlier starts of the run
        for file in folder.glob("*.jsonl"):
            for line in file.read_bytes().splitlines():
                with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
                    entry = json.loads(line)
                    self.known[entry["turn"]] = entry | {"result": dict(entry["result"])}
        self.file = (folder / f"{uuid.uuid4().hex}.jsonl").open("xb", buffering=0)

    def add(self, turn: Turn) -> None:
        """Append the result of a turn."""
        entry = {"turn": turn.digest, "is_late": turn.is_late, "result": turn.result}
        line = json.dumps(entry).encode() + b"\n"
        try:
            written = self.file.write(line)
        except OSError as error:
            raise OSError(f"it cannot write its journal {self.file.name}: {error}") from None
        if written < len(line):
            raise OSError(f"it cannot write its journal {self.file.name}: the disk is full")


class EnvironmentBroker(Broker):
    """Every conversation has a process of its own, from its first turn to its end."""

    _journal: Journal | None = None

    def __init__(self, link: socket.socket, settings: Message) -> None:
        super().__init__(link, settings)
        self._conversations: dict[int, Conversation] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def on_message(self, message: Message) -> None:
        """Receive a message of the trainer."""
        if "journal" in message:
            if self._journal is not None:
                self._journal.file.close()
            self._renew()
            folder = message["journal"]
            self._journal = None if folder is None else Journal(Path(folder))
        elif "begin" in message:
            key, row, seed = message["begin"], message["row"], message["seed"]
            whole = json.dumps([message["place"], row, seed])
            digest = hashlib.sha256(whole.encode())
            self._conversations[key] = Conversation(key, row, seed, digest)
        elif "send" in message:
            self._send(self._conversations[message["send"]], message)
        elif (one := self._conversations.pop(message["end"])).unit or one.call:
            task = self.start(self._end(one))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Wait until the environments of conversations that are over are closed."""
        if self._ending:
            await asyncio.wait(self._ending)

    def _send(self, one: Conversation, message: Message) -> None:
        turn = one.add(message["message"], message["tokens"])
        if self._journal is not None and (entry := self._journal.known.get(turn.digest)):
            turn.result, turn.is_late = entry["result"], entry["is_late"]
            self.emit({"key": one.key} | entry["result"])
        else:
            one.call = self.start(self._answer(one, turn))

    async def _answer(self, one: Conversation, turn: Turn) -> None:
        name, number = self.settings["name"], len(one.turns)
        try:
            turn.result = {"answer": await self._call(one, turn)}
            one.deaths = 0
        except FailedError as error:
            verb = {"timed_out": "did not answer", "lost": "lost its infrastructure in"}
            text = f"{name} {verb.get(error.kind, 'failed in')} turn {number}: {error}"
            turn.result = {"failure": error.kind, "text": text}
        ends_run = self.settings["on_error"] == "end"
        ends_run = ends_run and turn.result.get("failure") in ("failed", "rewritten")
        if self._journal is not None and not ends_run:  # else a corrected one would have no effect
            self._journal.add(turn)
        self.emit({"key": one.key} | turn.result)

    async def _call(self, one: Conversation, turn: Turn) -> Message:
        """Return the answer to the last turn; raises FailedError."""
        limit = f"{self.settings['time_limit']:g} s"
        while True:
            try:
                if one.unit is None or one.unit.ended.is_set():
                    await self._make(one, limit)
                return await self._step(one, turn)
            except OverTimeError:
                await self._drop(one)
                # Its process may have done anything before it was ended: the next one has not
                # begun this turn.
                if turn.is_late or not self.description["answers_late"]:
                    raise FailedError("timed_out", f"the call took longer than {limit}") from None
                turn.is_late = True
            except DiedError as error:
                await self._drop(one)
                one.deaths += 1
                if one.deaths == 2:  # once, it may be killed because the machine lacks memory
                    raise FailedError("failed", f"its process died twice, {error}") from None

    async def _make(self, one: Conversation, limit: str) -> None:
        """Make the environment; if too slow, the conversation ends: its last turn was not sent."""
        try:
            await self._rebuild(one)
        except OverTimeError:
            await self._drop(one)
            text = f"making it, or repeating its earlier turns, took longer than {limit}"
            raise FailedError("timed_out", text) from None

    async def _rebuild(self, one: Conversation) -> None:
        """Make the environment in a new process, in the state after all turns but the last."""
        await self._drop(one)
        one.unit = await self.spawn()
        made = await self._request(one, {"make": one.row, "seed": one.seed})
        earlier = [(turn, (turn.result or {})["answer"]) for turn in one.turns[:-1]]
        if earlier and made["replays"]:
            await self._request(
                one, {"replay": [(turn.message, answer) for turn, answer in earlier]}
            )
            return
        for number, (turn, answer) in enumerate(earlier, start=1):
            if await self._step(one, turn) != answer:
                raise FailedError(
                    "lost",
                    f"{self.settings['name']} answered turn {number} differently when the "
                    "conversation was replayed in a new process; let answers depend on row, seed "
                    "and messages only, or define replay(turns)",
                )

    async def _step(self, one: Conversation, turn: Turn) -> Message:
        name = "late" if turn.is_late else "step"
        request = {name: True, "message": turn.message, "tokens": turn.tokens}
        answer: Message = (await self._request(one, request))["answer"]
        return answer

    async def _request(self, one: Conversation, request: Message) -> Message:
        assert one.unit is not None
        reply = await one.unit.call(request, limit=self.settings["time_limit"])
        if "failure" in reply:
            for line in reply["trace"].splitlines():
                self._print(line)
            raise FailedError(reply["failure"], reply["text"])
        return reply

    async def _drop(self, one: Conversation) -> None:
        unit, one.unit = one.unit, None
        if unit is not None:
            await self.end(unit)

    async def _end(self, one: Conversation) -> None:
        """Let the environment close, and end its process."""
        if one.call is not None and not one.call.done():
            one.call.cancel()
            await asyncio.wait({one.call})
        if (unit := one.unit) is None:
            return
        with contextlib.suppress(OverTimeError, DiedError):
            await unit.call({"close": True}, limit=CLOSE_SECONDS)
        await self.end(unit)


if __name__ == "__main__":
    EnvironmentBroker.main()

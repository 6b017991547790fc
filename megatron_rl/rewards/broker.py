"""The manager of a verifier's processes: each grades one call at a time, within its limit.

From the trainer: {"grade": key, "item": fields of an `Item`} and {"cancel": true}, which ends all
calls. To it, by key: an "answer" (of `worker.Call.grade`), {"is_late": true} or {"died": status}.
"""

import asyncio
import socket
from collections import deque
from typing import NamedTuple

from megatron_rl.workers.broker import Broker, DiedError, Message, OverTimeError, Unit

MOST_CALLS = 200  # of a process: limits what their leftovers add up to


class Task(NamedTuple):
    """An item to grade; is_alone: in a new process, because it failed with or after other items."""

    key: int
    item: list[str]
    is_alone: bool = False
    has_died: bool = False


class VerifierBroker(Broker):
    """Up to `workers` processes, or `batch_size` for each of them if the verifier is async."""

    def __init__(self, link: socket.socket, settings: Message) -> None:
        super().__init__(link, settings)
        self._waiting: deque[Task] = deque()
        self._idle: list[Unit] = []
        self._calls: set[asyncio.Task[None]] = set()

    def on_message(self, message: Message) -> None:
        """Receive a message of the trainer."""
        if "cancel" in message:
            self._waiting.clear()
            for call in self._calls:
                call.cancel()
        else:
            self._waiting.append(Task(message["grade"], message["item"]))
            self._hand_out()

    @property
    def _most(self) -> int:
        is_async = self.description["is_async"] and not self.description["is_batched"]
        return int(self.settings["workers"] * (self.settings["batch_size"] if is_async else 1))

    def _hand_out(self) -> None:
        while self._waiting and len(self._calls) < self._most:
            tasks = [self._waiting.popleft()]
            if self.description["is_batched"] and not tasks[0].is_alone:
                share = -(-(len(self._waiting) + 1) // self.settings["workers"])
                most = min(self.settings["batch_size"], share)
                while len(tasks) < most and self._waiting and not self._waiting[0].is_alone:
                    tasks.append(self._waiting.popleft())
            call = self.start(self._grade(tasks))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            call.add_done_callback(lambda _: self._hand_out())

    async def _grade(self, tasks: list[Task]) -> None:
        unit = None
        try:
            while unit is None or unit.ended.is_set():
                is_kept = self._idle and not tasks[0].is_alone
                unit = self._idle.pop() if is_kept else await self.spawn()
            request = {"items": [task.item for task in tasks]}
            reply = await unit.call(request, limit=self.settings["time_limit"])
            if isinstance(answers := reply["answers"], list):
                for task, answer in zip(tasks, answers, strict=True):
                    self.emit({"key": task.key, "answer": answer})
            elif not self._take_back(tasks, if_single=unit.calls > 1):
                self.emit({"key": tasks[0].key, "answer": answers})
            # Temporary files of a call go with its process.
            is_last = reply["is_last"] or tasks[0].is_alone or unit.has_left_files
            if not is_last and unit.calls < MOST_CALLS:
                self._idle.append(unit)
                unit = None
        except OverTimeError:
            if not self._take_back(tasks):
                self.emit({"key": tasks[0].key, "is_late": True})
        except DiedError as error:
            if self._take_back(tasks):
                return
            if tasks[0].has_died:  # once, it may be killed because the machine lacks memory
                self.emit({"key": tasks[0].key, "died": str(error)})
            else:
                self._waiting.appendleft(tasks[0]._replace(has_died=True))
        finally:
            if unit is not None:
                await self.end(unit)

    def _take_back(self, tasks: list[Task], *, if_single: bool = False) -> bool:
        """Grade each item alone if the cause may be another one; returns whether it may."""
        is_shared = len(tasks) > 1 or (if_single and not tasks[0].is_alone)
        if is_shared:
            self._waiting.extendleft(task._replace(is_alone=True) for task in reversed(tasks))
        return is_shared


if __name__ == "__main__":
    VerifierBroker.main()

"""An environment process: many conversations, whose calls wait for each other only while they run.

Started by `megatron_rl.environments.pool` as `python -m megatron_rl.environments.worker`, with a
new interpreter, as a verifier's (`megatron_rl.rewards.worker`). Lines of JSON, to this process:

    {"key": 3, "row": "{...}", "seed": 7, "turns": [TURN, ...]}   make the environment of a
        conversation, replay all turns but the last, and answer the last
    {"key": 3, "turns": [TURN]}                                    answer the next turn
    {"end": 3}                                                       forget the conversation

A TURN is {"message": text, "answer": an answer or null, "timed_out": true or false, "tokens":
`TurnTokens` or null}. From it: first
{"ready": ...} or {"error": ...}; {"started": 3} before every call, so that the time limit of a call
does not include waiting for others; then an "answer" or a "failure" with its "trace".
"""

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import sys
import traceback
from functools import partial
from io import RawIOBase
from typing import Any

from megatron_rl.environments.agent import AgentEnvironment
from megatron_rl.environments.endpoint import RewrittenHistoryError
from megatron_rl.environments.interface import (
    Answer,
    InfrastructureError,
    TurnTokens,
    load_environment,
    read_answer,
)
from megatron_rl.errors import UserError
from megatron_rl.rewards.worker import isolate, send
from megatron_rl.texts import clean

LONGEST_REQUEST = 1 << 30  # bytes of a line
_MAX_TEXT = 300  # characters of an error


class OverTimeError(Exception):
    """A call that exceeded the time limit while it was waiting."""


class DifferentAnswerError(Exception):
    """An environment that answered a replayed turn differently."""


class Worker:
    """The environments of the conversations of this process, by key."""

    def __init__(
        self,
        make: Any,
        *,
        name: str,
        time_limit: float,
        output: RawIOBase,
        max_rewrites: int = 0,
    ) -> None:
        self._make, self._name, self._time_limit, self._output = make, name, time_limit, output
        self._max_rewrites = max_rewrites
        self._environments: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, source: int) -> None:
        """Serve the requests of the file descriptor `source` until it ends."""
        reader = asyncio.StreamReader(limit=LONGEST_REQUEST)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb", buffering=0)
        )
        while line := await reader.readline():
            request = json.loads(line)
            if "end" in request:
                if (task := self._tasks.get(request["end"])) is not None:
                    task.cancel()
                self._forget(request["end"])
                continue
            task = self._tasks[request["key"]] = asyncio.create_task(self._serve(request))
            task.add_done_callback(partial(self._finish, request["key"]))
        sys.stdout.flush()
        os._exit(0)  # threads and tasks of environments that are left do not delay the end

    async def _serve(self, request: dict[str, Any]) -> None:
        key, turns = request["key"], request["turns"]
        try:
            if "row" in request:
                await self._rebuild(request)
            reply = await self._answer(key, turns[-1])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the parent decides
            self._forget(key)
            reply = self._failure(error)
        send(self._output, {"key": key, **reply})

    def _finish(self, key: int, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if task.cancelled():  # the conversation was ended; the parent counts on a reply
            send(self._output, {"key": key, "failure": "failed", "text": "ended", "trace": ""})

    def _forget(self, key: int) -> None:
        environment = self._environments.pop(key, None)
        try:
            if hasattr(environment, "close"):
                environment.close()
        except Exception:  # noqa: BLE001 - the conversation is over
            traceback.print_exc()

    async def _rebuild(self, request: dict[str, Any]) -> None:
        key, (*earlier, _) = request["key"], request["turns"]
        row, seed = json.loads(request["row"]), request["seed"]
        environment = self._environments[key] = await self._call(key, self._make, row, seed)
        if isinstance(environment, AgentEnvironment):
            environment.max_rewrites = self._max_rewrites
        if earlier and hasattr(self._environments[key], "replay"):
            known = [(turn["message"], Answer(**turn["answer"])) for turn in earlier]
            await self._call(key, self._environments[key].replay, known)
            return
        for number, turn in enumerate(earlier, start=1):
            reply = await self._answer(key, turn)
            if reply["answer"] != turn["answer"]:
                raise DifferentAnswerError(
                    f"{self._name} answered turn {number} differently when the conversation was "
                    "replayed in a new process; let answers depend on row, seed and messages only, "
                    "or define replay(turns)"
                )

    async def _answer(self, key: int, turn: dict[str, Any]) -> dict[str, Any]:
        environment, message = self._environments[key], turn["message"]
        late = turn["timed_out"]
        if turn["tokens"] is not None:
            environment.receive_tokens(TurnTokens(**turn["tokens"]))
        if not late:
            try:
                value = await self._call(key, environment.step, message)
            except OverTimeError:
                if not hasattr(environment, "timed_out"):
                    raise
                late = True
        if late:
            value = await self._call(key, environment.timed_out, message)
        return {"answer": read_answer(value, name=self._name), "timed_out": late}

    async def _call(self, key: int, function: Any, *arguments: Any) -> Any:
        send(self._output, {"started": key})
        try:
            async with asyncio.timeout(self._time_limit) as limit:
                value = function(*arguments)
                return await value if inspect.isawaitable(value) else value
        except TimeoutError as error:
            if limit.expired():
                raise OverTimeError from None
            raise error from None  # of a client that the environment uses

    def _failure(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, OverTimeError):
            return {"failure": "timed_out", "text": "", "trace": ""}
        kind = "lost" if isinstance(error, InfrastructureError | DifferentAnswerError) else "failed"
        kind = "rewritten" if isinstance(error, RewrittenHistoryError) else kind
        trace = clean("".join(traceback.format_exception(error)))
        return {"failure": kind, "text": clean(_one_line(error)), "trace": trace}


def _one_line(error: BaseException) -> str:
    """Format an error as one line, with the line of the environment's code."""
    if isinstance(error, DifferentAnswerError | UserError):
        return str(error)
    text = " ".join(str(error).split())
    text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    if not own or own[-1].name == read_answer.__name__ or "interface.py" in own[-1].filename:
        return text  # of `read_answer`, which names the rule
    return f"{type(error).__name__}: {text} ({own[-1].filename}, line {own[-1].lineno})"


def main() -> None:
    """Serve requests until standard input ends; the kernel kills the process with its parent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--environment", required=True)
    parser.add_argument("--time-limit", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--max-rewrites", type=int, required=True)
    arguments = parser.parse_args()
    output = isolate(arguments.parent)
    source = os.dup(0)  # an environment that reads standard input finds its end
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        try:
            make = load_environment(arguments.environment)
            tools = list(make.describe_tools()) if hasattr(make, "describe_tools") else []
        except Exception:  # noqa: BLE001 - the parent raises it
            send(output, {"error": clean(traceback.format_exc())})
            return
        ready = {
            "tools": tools,
            "answers_late": hasattr(make, "timed_out"),
            "takes_tokens": hasattr(make, "receive_tokens"),
        }
        send(output, {"ready": ready})
        worker = Worker(
            make,
            name=arguments.environment,
            time_limit=arguments.time_limit,
            output=output,
            max_rewrites=arguments.max_rewrites,
        )
        asyncio.run(worker.serve(source))


if __name__ == "__main__":
    main()

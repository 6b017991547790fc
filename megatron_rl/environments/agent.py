"""A user's agent as an environment: it calls the policy through OpenAI's chat completions.

The agent's loop stays as it is; only the address of its model is ours. Its requests are answered by
the turns that the policy samples, and the messages that a request adds are the observation of the
turn before. So a request must extend the conversation: what the policy sampled cannot change.
"""

import asyncio
import contextlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from typing import IO, Any, ClassVar

from megatron_rl.environments.call_formats import CallFormat
from megatron_rl.environments.endpoint import Endpoint, Session
from megatron_rl.environments.interface import Answer, TurnTokens
from megatron_rl.errors import UserError
from megatron_rl.messages import parse_messages
from megatron_rl.rewards.worker import as_number, format_value

_MAX_ERROR = 300  # characters of a command's last line
_ENDING = 1 << 16  # bytes of an output in which that is looked for


class AgentExitError(Exception):
    """An agent's `run` raised what would end its whole process."""


class AgentEnvironment:
    """Derive a class with `run`, which returns the reward of the conversation.

    prompt: column of the row with the first messages, a list or the text of a user. The agent's
    first request must contain exactly these messages, which the policy has answered already.
    call_format: how the model writes tool calls, for an agent that sends tools.
    """

    prompt: ClassVar[str] = "prompt"
    call_format: ClassVar[CallFormat] = "hermes"

    max_rewrites = 0  # of the run

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row, self.seed = row, seed
        self._session: Session | None = None
        self._tokens: TurnTokens | None = None
        self._agent: asyncio.Task[Any] | None = None

    def run(self, url: str) -> Any:
        """Run the agent with the model at `url` (`http://127.0.0.1:...`) and return the reward.

        `async`, or a plain function, which runs in a thread.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method run(url)")

    def receive_tokens(self, tokens: TurnTokens) -> None:
        """Keep the tokens of the next turn, for an agent that asks for them."""
        self._tokens = tokens

    async def step(self, message: str) -> Answer:
        """Answer the agent's request with this turn; return what the next request adds."""
        if self._session is None:
            self._session = Session(
                self._first_messages(),
                call_format=self.call_format,
                max_rewrites=self.max_rewrites,
            )
            self._endpoint = await Endpoint(self._session).start()
            self._session.receive(self._tokens)
            self._agent = asyncio.create_task(self._run(self._endpoint.url))
            if await self._next_request() is None:
                raise UserError("the agent ended without a request to the model")
        else:
            self._session.receive(self._tokens)
        self._session.answer(message)
        request = await self._next_request()
        if request is not None:
            return request
        assert self._agent is not None
        reward = as_number(self._agent.result())
        if reward is None:
            returned = format_value(self._agent.result())
            raise UserError(f"the agent returned {returned}; return the reward, a finite number")
        return Answer(reward=reward, done=True, reason="agent ended")

    async def close(self) -> None:
        """End the agent of a conversation that is over."""
        if self._session is not None:
            self._session.close()
            self._endpoint.close()
        if self._agent is not None:
            self._agent.cancel()
            await asyncio.wait({self._agent})

    def _first_messages(self) -> list[dict[str, Any]]:
        if self.prompt not in self.row:
            raise UserError(
                f"the row has no column {self.prompt!r} (its columns: {', '.join(self.row)}); set "
                f"{type(self).__name__}.prompt to the column of the prompt"
            )
        return list(parse_messages(self.row[self.prompt], key=self.prompt))

    async def _run(self, url: str) -> Any:
        try:
            if inspect.iscoroutinefunction(self.run):
                return await self.run(url)
            return await asyncio.to_thread(self.run, url)
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio ends its loop on these
            raise AgentExitError(f"{type(error).__name__}: {error}") from error

    async def _next_request(self) -> Answer | None:
        """Wait for the agent's next request; None if the agent ended instead."""
        assert self._session is not None
        assert self._agent is not None
        request = asyncio.create_task(self._session.next_request())
        try:
            await asyncio.wait({request, self._agent}, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return request.result()
            if self._agent.cancelled():
                raise AgentExitError("CancelledError")
            self._agent.result()  # raises what the agent raised
            return None
        finally:
            request.cancel()


class AgentCommand(AgentEnvironment):
    """An agent that is a program, also one of another virtual environment.

    command: the program and its arguments. It finds the model's address in OPENAI_BASE_URL, as
    OpenAI's client does, and the row as one line of JSON on standard input; the last line of its
    output is the reward.
    """

    command: ClassVar[Sequence[str]] = ()

    async def run(self, url: str) -> float:
        """Run the program and read its reward."""
        # PYTHONPATH has the modules of this environment, which another one must not load.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # Files and not pipes, which would end with all that the program leaves running.
        with TemporaryFile() as row, TemporaryFile() as output, TemporaryFile() as errors:
            row.write(json.dumps(self.row).encode() + b"\n")
            row.seek(0)
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=row,
                stdout=output,
                stderr=errors,
                env=variables | {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"},
            )
            try:
                await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    process.kill()
            last, reason = _last_line(output), _last_line(errors)[:_MAX_ERROR]
        with contextlib.suppress(ValueError):
            if process.returncode == 0:
                return float(last)
        raise UserError(
            f"{self.command[0]} ended with status {process.returncode} and the last line "
            f"{last[:_MAX_ERROR]!r} {reason}; print the reward, a number, as the last line"
        )


def _last_line(file: IO[bytes]) -> str:
    """Return the last line of a file that is not empty."""
    file.seek(max(file.seek(0, os.SEEK_END) - _ENDING, 0))
    lines = file.read().decode(errors="replace").split("\n")
    return next(filter(None, reversed(lines)), "")

"""Agents as a user has them, in this environment and as a program; no torch here."""

import asyncio
import contextlib
import sys
from pathlib import Path

from megatron_rl.environments.agent import AgentCommand, AgentEnvironment

with contextlib.suppress(ImportError):  # it comes with vLLM
    from openai import AsyncOpenAI

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.",
          "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}]  # fmt: skip


def client(url):
    return AsyncOpenAI(base_url=url, api_key="none")


async def complete(url, messages, **more):
    answer = await client(url).chat.completions.create(model="policy", messages=messages, **more)
    return answer.choices[0]


class Guesser(AgentEnvironment):
    """Answers higher or lower until the number is guessed; with OpenAI's client, unmodified."""

    async def run(self, url):
        messages = list(self.row["prompt"])
        for _ in range(5):
            choice = await complete(url, messages, temperature=0.3)
            assert choice.finish_reason == "stop"
            guess = int(choice.message.content)
            if guess == self.row["secret"]:
                return 1.0
            messages.append(choice.message.model_dump(exclude_none=True))
            hint = "higher" if guess < self.row["secret"] else "lower"
            messages.append({"role": "user", "content": hint})
        return 0.0


class Looker(AgentEnvironment):
    """Runs the model's tool calls, as agents do."""

    async def run(self, url):
        messages = list(self.row["prompt"])
        while True:
            choice = await complete(url, messages, tools=TOOLS)
            messages.append(choice.message)
            if choice.finish_reason != "tool_calls":
                return float(choice.message.content == "blue")
            for call in choice.message.tool_calls:
                content = f"{call.function.name}: {call.function.arguments}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


class Rewriter(AgentEnvironment):
    """Summarizes what the model wrote."""

    async def run(self, url):
        first = await complete(url, self.row["prompt"])
        summary = {"role": "assistant", "content": first.message.content[:2]}
        await complete(url, [*self.row["prompt"], summary, {"role": "user", "content": "Go on."}])
        return 1.0


class TwiceRewriter(AgentEnvironment):
    """Begins a history of its own with every request."""

    async def run(self, url):
        await complete(url, self.row["prompt"])
        for text in ("One.", "Two."):
            await complete(url, [{"role": "user", "content": text}])
        return 1.0


class Ending(AgentEnvironment):
    """Ends without a reward, or by an error, as the model's turn orders."""

    async def run(self, url):
        choice = await complete(url, self.row["prompt"])
        if choice.message.content == "raise":
            raise LookupError("my own mistake")


class Silent(AgentEnvironment):
    async def run(self, url):
        return 1.0


class Waiting(AgentEnvironment):
    """Leaves a mark when its conversation is ended."""

    async def run(self, url):
        try:
            await complete(url, self.row["prompt"])
            Path(self.row["started"]).touch()
            await asyncio.sleep(600)
        finally:
            Path(self.row["mark"]).touch()


class LeavingProgram(AgentCommand):
    """Starts a server that goes on when it ends itself."""

    command = (
        "sh", "-c",
        f"sleep 1234 & exec '{sys.executable}' -m tests.unit.environments.agent_program",
    )  # fmt: skip


class BrokenProgram(AgentCommand):
    command = (sys.executable, "-c", "import sys; sys.exit('no such model')")


class Any(AgentEnvironment):
    """Is the agent that the row names, so that those of one pool share what they import."""

    async def run(self, url):
        return await globals()[self.row["agent"]].run(self, url)

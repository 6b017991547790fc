"""Environments that do what an environment must not, as the policy's turn orders; no torch here."""

import asyncio
import math
import os
import signal
import sys
import time
from pathlib import Path

from megatron_rl.environments.interface import Answer, InfrastructureError


class Obedient:
    """Follows a turn's instruction, or answers with its state: row, seed, turns so far."""

    def __init__(self, row, seed):
        self.row, self.seed, self.turns = row, seed, []

    async def step(self, message):
        self.turns.append(message)
        match message.split():
            case ["wait", seconds]:
                await asyncio.sleep(float(seconds))
            case ["wait-for", path]:
                while not Path(path).exists():
                    await asyncio.sleep(0.01)
            case ["touch", path]:
                Path(path).touch()
            case ["sleep", seconds]:  # blocks the process
                time.sleep(float(seconds))
            case ["spin"]:  # keeps the interpreter's lock inside C code
                sum(range(10**12))
            case ["die"]:
                os.kill(os.getpid(), signal.SIGSEGV)
            case ["die-once", path] if not Path(path).exists():
                Path(path).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case ["exit"]:
                sys.exit(3)
            case ["raise"]:
                raise LookupError("broken\non purpose")
            case ["late"]:
                raise TimeoutError("of a client")
            case ["lose"]:
                raise InfrastructureError("no sandbox left")
            case ["print", count]:
                print("x" * int(count))
            case ["read"]:
                return Answer(sys.stdin.read() + "nothing to read")
            case ["long", count]:
                return Answer("y" * int(count))
            case ["count", path]:  # a side effect
                with Path(path).open("a") as file:
                    file.write("called\n")
            case ["pid"]:
                return Answer(str(os.getpid()))
            case ["modules"]:
                return Answer(
                    ",".join(sorted({"torch", "vllm", "transformers"} & set(sys.modules)))
                )
            case ["environment"]:
                return Answer(",".join(sorted(os.environ)))
            case ["return", what]:
                return RETURNED[what]
            case ["done"]:
                return Answer(done=True, reward=1.0, reason="scripted")
        return Answer(f"{self.row['name']} {self.seed} {len(self.turns)} {'/'.join(self.turns)}")


RETURNED = {
    "nan": Answer("", reward=math.nan),
    "infinity": Answer("", reward=math.inf),
    "text-reward": Answer("", reward="1"),
    "text": "a text",
    "nothing": None,
    "number-observation": Answer(3),
    "policy-message": Answer([{"role": "assistant", "content": "I am the policy"}]),
    "no-content": Answer([{"role": "user"}]),
    "object": Answer([{"role": "user", "content": "x", "extra": object()}]),
    "number-done": Answer("", done=1),
    "surrogates": Answer("half \ud83d", reason="cut \udc00"),
    "surrogate-message": Answer([{"role": "tool", "content": "half \ud83d", "name": "t"}]),
}


class Deaf(Obedient):
    """The same, but a turn over the time limit has an answer."""

    def timed_out(self, message):
        return Answer(f"timed out after {len(self.turns)} turns")


class DeafAndSlow(Deaf):
    """Never ready, so that no turn begins that could be over the time limit."""

    def __init__(self, row, seed):
        time.sleep(60)


class Unsteady(Obedient):
    """Answers by the process that it is in."""

    async def step(self, message):
        if message == "hello":
            return Answer(str(os.getpid()))
        return await super().step(message)


class Remembering(Obedient):
    """Restores its state without calling `step` again."""

    def replay(self, turns):
        self.turns = [message for message, _ in turns]


class RaisesAtOnce(Obedient):
    def __init__(self, row, seed):
        raise KeyError("no such row")


class Hangs(Obedient):
    def __init__(self, row, seed):
        time.sleep(600)


def plain(row, seed):
    """A factory of an environment whose step is a plain function."""
    return _Plain()


class _Plain:
    def step(self, message):
        return Answer(message.upper())


class OwnLimit(Obedient):
    """Has an attribute with the name of a setting of agents."""

    max_rewrites = 7

    async def step(self, message):
        return Answer(reward=float(self.max_rewrites), done=True)

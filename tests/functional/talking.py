"""Environments for tests: answers of many lengths that depend on what was written, soon or late."""

import asyncio
import hashlib
import json
import random
import time
from dataclasses import replace
from pathlib import Path

from megatron_rl.environments import Answer


class Digits:
    """Answers each turn by up to 12 digits of a hash of all turns; some conversations end early.

    A row with `hangs` never answers its second turn, one with `raises` fails on it, one with
    `unknown_role` answers it by a message that the template refuses, and one with `flat` has no
    rewards above 0.
    """

    def __init__(self, row, seed):
        self.row, self.seed, self.turns = row, seed, []

    async def step(self, message):
        self.turns.append(message)
        digest = hashlib.sha256(repr((self.seed, self.turns)).encode()).digest()
        if len(self.turns) == 2 and self.row.get("hangs"):
            time.sleep(1000)
        if len(self.turns) == 2 and self.row.get("raises"):
            raise ValueError("no such page")
        if len(self.turns) == 2 and self.row.get("unknown_role"):
            return Answer([{"role": "ipython", "content": "7"}], reward=1.0)
        text = "".join(str(byte % 10) for byte in digest[1 : 1 + digest[0] % 13])
        reward = 0.0 if self.row.get("flat") else float(digest[20] % 2)
        return Answer(text, reward=reward, done=digest[21] % 6 == 0, reason="scripted")


class Late(Digits):
    """The same answers in another order every time."""

    async def step(self, message):
        await asyncio.sleep(0.05 * random.random())
        return await super().step(message)


class Restarting:
    """Before another class: each second answer replaces everything before it by a summary."""

    async def step(self, message):
        answer = await super().step(message)
        if len(self.turns) % 2 or answer.done:
            return answer
        history = [
            {"role": "user", "content": f"sofar{len(self.turns)}"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": answer.observation},
        ]
        return replace(answer, observation=history, restarts=True)


class Restarts(Restarting, Digits):
    """The same answers, with replaced histories."""


class Ungraded(Digits):
    """The same without rewards, so that the verifier grades."""

    async def step(self, message):
        answer = await super().step(message)
        return Answer(answer.observation, done=answer.done)


class Refuses(Digits):
    """Cannot be made from any row."""

    def __init__(self, row, seed):
        raise ValueError("refuses rows like this")


class Ledger(Late):
    """Writes each call to a file of the row's folder: a side effect that must not be repeated.

    Waits before its second call while the folder has a file `hold` that contains its seed.
    """

    async def step(self, message):
        if len(self.turns) == 1 and self._is_held():
            self._write("waiting", self.seed)
            while self._is_held():
                await asyncio.sleep(0.02)
        self._write("calls", [self.seed, *self.turns, message])
        return await super().step(message)

    def replay(self, turns):
        self.turns = [message for message, _ in turns]

    def close(self):
        self._write("closed", self.seed)

    def _is_held(self):
        hold = Path(self.row["folder"]) / "hold"
        return hold.exists() and self.seed in json.loads(hold.read_text())

    def _write(self, name, what):
        with (Path(self.row["folder"]) / name).open("a") as file:
            file.write(json.dumps(what) + "\n")


class RestartLedger(Restarting, Ledger):
    """Both: `Ledger.replay` knows the turns, from which the answers follow."""

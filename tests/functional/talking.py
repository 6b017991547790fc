"""Environments for tests: answers of many lengths that depend on what was written, soon or late."""

import asyncio
import hashlib
import random
import time

from megatron_rl.environments import Answer


class Digits:
    """Answers each turn by up to 12 digits of a hash of all turns; some conversations end early.

    A row with `hangs` never answers its second turn, one with `raises` fails on it.
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
        text = "".join(str(byte % 10) for byte in digest[1 : 1 + digest[0] % 13])
        return Answer(
            text, reward=float(digest[20] % 2), done=digest[21] % 6 == 0, reason="scripted"
        )


class Late(Digits):
    """The same answers in another order every time."""

    async def step(self, message):
        await asyncio.sleep(0.05 * random.random())
        return await super().step(message)


class Ungraded(Digits):
    """The same without rewards, so that the verifier grades."""

    async def step(self, message):
        answer = await super().step(message)
        return Answer(answer.observation, done=answer.done)


class Refuses(Digits):
    """Cannot be made from any row."""

    def __init__(self, row, seed):
        raise ValueError("refuses rows like this")

"""Tools for the tests; no torch here."""

import os
import signal
import time
from typing import Literal

from megatron_rl.environments.interface import InfrastructureError
from megatron_rl.environments.tools import ToolEnvironment


def price(item: str, count: int = 1, *, row) -> float:
    """Return the price of some pieces of an item.

    Args:
        item: The name of the item,
            in lower case: as the customer wrote it.
        count (int): The number of pieces.

    Returns:
        The price in euros.
    """
    return row["prices"][item] * count


async def stock(
    item: str, unit: Literal["piece", "box"] = "piece", sizes: list[int] | None = None
) -> dict:
    """Return what is in stock.

    Args:
        item: The name.
        unit: What is counted.
        sizes: The sizes to count, all if null.
    """
    return {"item": item, "unit": unit, "sizes": sizes}


def order(what: str) -> str:
    """Do what a tool must not.

    Args:
        what: One of the mistakes.
    """
    match what:
        case "hang":
            time.sleep(600)
        case "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "lose":
            raise InfrastructureError("the shop is closed")
        case "long":
            return "z" * 10_000_000
    return f"ordered {what} \ud83d"


class Shop(ToolEnvironment):
    tools = (price, stock, order)

    def reward(self, text):
        return float(text.endswith(self.row["answer"]))


class Graded(ToolEnvironment):
    """Without a reward, in the format of Llama."""

    tools = (price,)
    call_format = "llama3_json"


def _same(x: int) -> int:
    """Return it."""
    return x


class Undescribed(ToolEnvironment):
    tools = (_same,)

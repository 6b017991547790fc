"""Insertion sort of different symbols: `7a3` is answered by `7>7|a>7a|3>37a`.

Each line takes the next symbol of the question, and holds all that were taken so far in order
(digits before letters). How long a line is grows with the trace.
"""

import random
from dataclasses import dataclass

from megatron_rl.tasks.trace import Pen

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"  # in order


@dataclass(frozen=True)
class InsertionSort:
    """Symbols to sort, no two alike."""

    symbols: str

    @property
    def question(self) -> str:
        """The symbols as they come."""
        return self.symbols

    def solve(self, pen: Pen) -> None:
        """Each line is decided symbol by symbol from the one before."""
        line = ""
        for number, symbol in enumerate(self.symbols):
            pen.write(f"{'|' if number else ''}{symbol}>")
            place = next((i for i, other in enumerate(line) if other > symbol), len(line))
            wanted = line[:place] + symbol + line[place:]
            line = "".join(pen.decide(one, among=SYMBOLS) for one in wanted)


def draw(generator: random.Random, size: int) -> InsertionSort:
    """`size` random symbols; the trace has size * (size + 7) / 2 tokens with the end."""
    return InsertionSort("".join(generator.sample(SYMBOLS, size)))

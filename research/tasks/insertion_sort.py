"""Insertion sort of distinct symbols: the solution of `7a3` is `7>7|a>7a|3>37a`.

Each line inserts the next symbol of the question into the sorted symbols so far (digits before
letters), so lines grow along the solution.
"""

import random
from dataclasses import dataclass

from research.tasks.worked_solution import SolutionWriter

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"  # in sort order


@dataclass(frozen=True)
class InsertionSort:
    """Distinct symbols to sort."""

    symbols: str

    @property
    def question(self) -> str:
        """The unsorted symbols."""
        return self.symbols

    def solve(self, writer: SolutionWriter) -> None:
        """Write the lines, deciding each symbol from the line before."""
        line = ""
        for number, symbol in enumerate(self.symbols):
            writer.write(f"{'|' if number else ''}{symbol}>")
            position = next((i for i, other in enumerate(line) if other > symbol), len(line))
            expected = line[:position] + symbol + line[position:]
            line = "".join(writer.decide(letter, among=SYMBOLS) for letter in expected)


def draw(generator: random.Random, size: int) -> InsertionSort:
    """Draw `size` symbols; the solution has size * (size + 7) / 2 tokens with the end token."""
    return InsertionSort("".join(generator.sample(SYMBOLS, size)))

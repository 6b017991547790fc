"""Long multiplication with all steps written out, lowest digits first.

`12*34`: for each digit of the second factor and each digit of the first, a step such as
`2*4+0+0=80,` contains digit * digit + previous digit + carry = new digit, new carry (8, carry 0).
After the last step comes the product, highest digit first. The question has a `?` at every digit
that the model must compute.
"""

import random
from dataclasses import dataclass

from research.tasks.worked_solution import SolutionWriter

DIGITS = "0123456789"


@dataclass
class _Blanks(SolutionWriter):
    """Writer of a question: the solution with blanks."""

    def decide(self, symbol: str, among: str) -> str:
        super().decide("?", among)
        return symbol


@dataclass(frozen=True)
class Multiplication:
    """Two factors with the same number of digits."""

    first: int
    second: int

    @property
    def question(self) -> str:
        """Steps of the solution with blanks."""
        writer = _Blanks()
        self.solve(writer)
        return writer.text

    def solve(self, writer: SolutionWriter) -> None:
        """Write the steps, deciding each digit and carry from those before."""
        lower, upper = ([int(d) for d in reversed(str(n))] for n in (self.first, self.second))
        total = [0] * (len(lower) + len(upper))
        for shift, b in enumerate(upper):
            carry = 0
            for position, a in enumerate(lower, start=shift):
                writer.write(f"{a}*{b}+")
                previous = int(writer.decide(str(total[position]), among=DIGITS))
                writer.write("+")
                carry = int(writer.decide(str(carry), among=DIGITS))
                writer.write("=")
                step = a * b + previous + carry
                total[position] = int(writer.decide(str(step % 10), among=DIGITS))
                carry = int(writer.decide(str(step // 10), among=DIGITS))
                writer.write(",")
            total[shift + len(lower)] = carry
        writer.write(">")
        for digit in reversed(total):
            writer.decide(str(digit), among=DIGITS)


def draw(generator: random.Random, size: int) -> Multiplication:
    """Draw two factors of `size` digits; the solution has 11 * size**2 + 2 * size + 2 tokens."""
    low, high = 10 ** (size - 1), 10**size
    return Multiplication(generator.randrange(low, high), generator.randrange(low, high))

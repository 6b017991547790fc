"""Long multiplication with everything written out, lowest digits first.

`12*34`: for each digit of the second factor, and each of the first, a step such as `2*4+0+0=80,`
says digit * digit + what stands there already + what was carried = new digit, new carry: 8, and 0
to carry. After the last step comes the product, highest digit first. The question has a `?`
wherever the answer has to think.
"""

import random
from dataclasses import dataclass

from megatron_rl.tasks.trace import Pen

DIGITS = "0123456789"


@dataclass
class _Blanks(Pen):
    """Writes the form that a question is."""

    def decide(self, symbol: str, among: str) -> str:
        super().decide("?", among)
        return symbol


@dataclass(frozen=True)
class Multiplication:
    """Two factors of as many digits each."""

    first: int
    second: int

    @property
    def question(self) -> str:
        """The steps with blanks."""
        pen = _Blanks()
        self.solve(pen)
        return pen.text

    def solve(self, pen: Pen) -> None:
        """Every digit and carry is decided from those before."""
        lower, upper = ([int(d) for d in reversed(str(n))] for n in (self.first, self.second))
        total = [0] * (len(lower) + len(upper))
        for shift, two in enumerate(upper):
            carry = 0
            for place, one in enumerate(lower, start=shift):
                pen.write(f"{one}*{two}+")
                there = int(pen.decide(str(total[place]), among=DIGITS))
                pen.write("+")
                carry = int(pen.decide(str(carry), among=DIGITS))
                pen.write("=")
                step = one * two + there + carry
                total[place] = int(pen.decide(str(step % 10), among=DIGITS))
                carry = int(pen.decide(str(step // 10), among=DIGITS))
                pen.write(",")
            total[shift + len(lower)] = carry
        pen.write(">")
        for digit in reversed(total):
            pen.decide(str(digit), among=DIGITS)


def draw(generator: random.Random, size: int) -> Multiplication:
    """Two factors of `size` digits; 11 * size**2 + 2 * size + 2 tokens with the end."""
    low, high = 10 ** (size - 1), 10**size
    return Multiplication(generator.randrange(low, high), generator.randrange(low, high))

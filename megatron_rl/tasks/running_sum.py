"""Running sums modulo 10: `4+8=?-3=?` is answered by `4+8=2-3=9`.

The question has a place for every symbol of the answer, so that copying means to look back by
always the same distance: a small model learns that at hundreds of terms too.
"""

import random
from dataclasses import dataclass

from megatron_rl.tasks.trace import Pen

DIGITS = "0123456789"


@dataclass(frozen=True)
class RunningSum:
    """The first term, then (sign, term) in order."""

    first: int
    rest: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        """All terms, with `=?` where a sum is asked for."""
        return str(self.first) + "".join(f"{sign}{term}=?" for sign, term in self.rest)

    def solve(self, pen: Pen) -> None:
        """Each sum is decided from the one before."""
        total = self.first
        pen.write(str(total))
        for sign, term in self.rest:
            pen.write(f"{sign}{term}=")
            total = int(pen.decide(str((total + int(f"{sign}{term}")) % 10), among=DIGITS))


def draw(generator: random.Random, size: int) -> RunningSum:
    """A random sum of `size` terms; its trace has 4 * size - 2 tokens with the end."""
    rest = tuple((generator.choice("+-"), generator.randrange(10)) for _ in range(size - 1))
    return RunningSum(generator.randrange(10), rest)


def draw_easy(generator: random.Random, size: int) -> RunningSum:
    """Some terms are 0 and some signs `+` beyond chance: none of them, or all, or any share.

    Of uniform terms each alone tells nothing of the sum, so that a model has nothing to begin with;
    zeros show it where the last sum is, and then few subtractions how to add. That sparse sums are
    good first lessons is from Saxena et al., arXiv 2410.03569.
    """
    ease = generator.random()
    rest = tuple(
        (
            "+" if generator.random() < ease else generator.choice("+-"),
            0 if generator.random() < ease else generator.randrange(10),
        )
        for _ in range(size - 1)
    )
    return RunningSum(generator.randrange(10), rest)

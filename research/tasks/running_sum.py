"""Running sums modulo 10: the solution of `4+8=?-3=?` is `4+8=2-3=9`.

The question has a placeholder for every symbol of the answer, so copying always attends to the same
distance. A small model learns this even with hundreds of terms.
"""

import random
from dataclasses import dataclass

from research.tasks.worked_solution import SolutionWriter

DIGITS = "0123456789"


@dataclass(frozen=True)
class RunningSum:
    """The first term, then (sign, term) in order."""

    first: int
    rest: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        """All terms, with `=?` for each sum."""
        return str(self.first) + "".join(f"{sign}{term}=?" for sign, term in self.rest)

    def solve(self, writer: SolutionWriter) -> None:
        """Write the terms, deciding each sum from the one before."""
        total = self.first
        writer.write(str(total))
        for sign, term in self.rest:
            writer.write(f"{sign}{term}=")
            total = int(writer.decide(str((total + int(f"{sign}{term}")) % 10), among=DIGITS))


def draw(generator: random.Random, size: int) -> RunningSum:
    """Draw a sum of `size` terms; its solution has 4 * size - 2 tokens including the end token."""
    rest = tuple((generator.choice("+-"), generator.randrange(10)) for _ in range(size - 1))
    return RunningSum(generator.randrange(10), rest)


def draw_easy(generator: random.Random, size: int) -> RunningSum:
    """Draw a sum in which a random fraction of terms is 0 and of signs `+`.

    A single uniform term gives no information about the sum, so a model has no signal to start
    from. Zeros teach it to find the last sum, and mostly positive terms teach it to add. Sparse
    sums as a first curriculum are from Saxena et al., arXiv 2410.03569.
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

"""How a trace is written, where slips go, and how one is checked.

A trace is worked out by a problem with a `Pen`: what is only copied is written, what takes thought
is decided. A noisy pen slips in some decisions. A slip that is not corrected stays, and the rest
follows from it, so that noisy traces are consistent in themselves and wrong at the end.

Where slips may be corrected a decision is written twice, as a first thought and as what stands:
`8+4=3~2` says 2, and so does `8+4=2~2`. A correction then takes no more room than none, and
whatever looks back by a fixed distance still finds its place.
"""

import contextlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

CORRECTION = "~"
_CORRECTED = re.compile(f".{CORRECTION}", re.DOTALL)
LONGEST_WANDERING = 2  # a trace with slips may become so many times as long as the right one


class Problem(Protocol):
    """One question and the way to its answer."""

    @property
    def question(self) -> str:
        """What the model is asked."""

    def solve(self, pen: "Pen") -> None:
        """Write the trace, going on from whatever the pen has decided."""


Draw = Callable[[random.Random, int], Problem]


@dataclass(frozen=True)
class Twice:
    """A problem whose decisions are written twice."""

    problem: Problem
    blank: str  # of the question, where a decision goes

    @property
    def question(self) -> str:
        """With room for both."""
        once = self.problem.question
        return (
            once.replace(self.blank, self.blank + CORRECTION + self.blank) if self.blank else once
        )

    def solve(self, pen: "Pen") -> None:
        """As the problem is solved."""
        pen.twice = True
        self.problem.solve(pen)


@lru_cache
def draw_twice(draw: Draw, blank: str) -> Draw:
    """The same problems, their decisions written twice."""
    return lambda generator, size: Twice(draw(generator, size), blank)


@dataclass(frozen=True)
class Noise:
    """Which decisions a noisy pen gets wrong."""

    rate: float  # slips per decision, over the whole trace
    place: Literal["early", "late", "even"] = "even"  # all in the first third, the last, anywhere
    corrected: float = 0.0  # share of the slips that are corrected, where decisions are twice

    def rate_at(self, progress: float) -> float:
        """The rate where this share of the decisions has been made, 0 <= progress < 1."""
        if self.place == "even":
            return min(self.rate, 1.0)
        noisy = progress < 1 / 3 if self.place == "early" else progress >= 2 / 3
        return min(3 * self.rate, 1.0) if noisy else 0.0


class StrayedError(Exception):
    """Slips have led a trace astray: it would go on for too long."""


@dataclass
class Pen:
    """Writes a trace without slips."""

    text: str = ""
    decisions: int = 0
    twice: bool = False  # decisions are written

    def write(self, text: str) -> None:
        """Write what takes no thought."""
        self.text += text

    def decide(self, symbol: str, among: str) -> str:
        """Write the symbol that is right here, one of `among`; returns what now counts as such."""
        self.decisions += 1
        self.put(symbol, symbol)
        return symbol

    def put(self, first: str, stands: str) -> None:
        """Write a first thought and what stands."""
        self.text += f"{first}{CORRECTION}{stands}" if self.twice else stands


@dataclass
class NoisyPen(Pen):
    """Writes a trace with slips; `expected` is the number of decisions of the right trace."""

    noise: Noise = field(kw_only=True)
    expected: int = field(kw_only=True)
    longest: int = field(kw_only=True)  # characters
    generator: random.Random = field(kw_only=True)

    def decide(self, symbol: str, among: str) -> str:
        """The right symbol, or by a slip another one."""
        if len(self.text) > self.longest:
            raise StrayedError
        progress = min(self.decisions / self.expected, 1 - 1e-9)
        self.decisions += 1
        if self.generator.random() >= self.noise.rate_at(progress):
            self.put(symbol, symbol)
            return symbol
        slip = self.generator.choice([other for other in among if other != symbol])
        corrected = self.generator.random() < self.noise.corrected and self.twice
        stands = symbol if corrected else slip
        self.put(slip, stands)
        return stands


def right_trace(problem: Problem) -> str:
    """The trace without a slip."""
    pen = Pen()
    problem.solve(pen)
    return pen.text


def right_answer(problem: Problem) -> str:
    """Of the right trace what stands."""
    return _CORRECTED.sub("", right_trace(problem))


def count_decisions(problem: Problem) -> int:
    """Decisions in the right trace."""
    pen = Pen()
    problem.solve(pen)
    return pen.decisions


def noisy_trace(problem: Problem, noise: Noise, generator: random.Random) -> str:
    """A trace with slips; what strays too far is cut."""
    right = Pen()
    problem.solve(right)
    pen = NoisyPen(
        noise=noise,
        expected=right.decisions,
        longest=LONGEST_WANDERING * len(right.text),
        generator=generator,
    )
    with contextlib.suppress(StrayedError):
        problem.solve(pen)
    return pen.text


def verify_trace(text: str, ground_truth: str, data_source: str) -> tuple[float, str, str | None]:
    """Reward 1 where the trace is the right one, each corrected symbol taken as corrected."""
    if text == ground_truth:
        return 1.0, "right", text
    corrected = _CORRECTED.sub("", text)
    if corrected == ground_truth:
        return 1.0, "right after corrections", corrected
    if ground_truth.startswith(corrected):
        return 0.0, "stops too early", corrected
    return 0.0, "wrong", corrected

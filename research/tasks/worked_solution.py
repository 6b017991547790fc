"""Worked solutions: writing them, adding errors and corrections, and verifying them.

A problem writes its solution with a `SolutionWriter`: `write` copies text, `decide` writes a symbol
that the model must compute. `NoisySolutionWriter` makes errors in some decisions. The rest of the
solution follows from an uncorrected error, so noisy solutions are self-consistent but have a wrong
result.

With self-correction every decision is written twice, as a first attempt and a final symbol:
`8+4=3~2` and `8+4=2~2` both mean 2. Corrected and uncorrected decisions have the same length, so
distances between related symbols stay fixed.
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
MAX_LENGTH_RATIO = 2  # maximum length of a noisy solution, relative to the correct one


class Problem(Protocol):
    """Question with a worked solution."""

    @property
    def question(self) -> str:
        """Prompt of the model."""

    def solve(self, writer: "SolutionWriter") -> None:
        """Write the solution, continuing from each decision of the writer."""


Draw = Callable[[random.Random, int], Problem]


@dataclass(frozen=True)
class SelfCorrection:
    """Problem whose decisions are written twice."""

    problem: Problem
    blank: str  # placeholder of a decision in the question

    @property
    def question(self) -> str:
        """The problem's question, with placeholders for both symbols."""
        question = self.problem.question
        return (
            question.replace(self.blank, self.blank + CORRECTION + self.blank)
            if self.blank
            else question
        )

    def solve(self, writer: "SolutionWriter") -> None:
        """Write the problem's solution with every decision twice."""
        writer.twice = True
        self.problem.solve(writer)


@lru_cache
def with_self_correction(draw: Draw, blank: str) -> Draw:
    """Return a function that draws the same problems with decisions written twice."""
    return lambda generator, size: SelfCorrection(draw(generator, size), blank)


@dataclass(frozen=True)
class Noise:
    """Rate, position and correction of errors in noisy solutions."""

    rate: float  # errors per decision, over the whole solution
    place: Literal["early", "late", "even"] = "even"  # first third, last third or anywhere
    corrected: float = 0.0  # fraction of errors that are corrected, with self-correction

    def rate_at(self, progress: float) -> float:
        """Return the error rate after a fraction `progress` of the decisions, 0 <= progress < 1."""
        if self.place == "even":
            return min(self.rate, 1.0)
        noisy = progress < 1 / 3 if self.place == "early" else progress >= 2 / 3
        return min(3 * self.rate, 1.0) if noisy else 0.0


class SolutionTooLongError(Exception):
    """Noisy solution that exceeds the length limit because of its errors."""


@dataclass
class SolutionWriter:
    """Writer of a correct solution."""

    text: str = ""
    decisions: int = 0
    twice: bool = False  # whether decisions are written twice

    def write(self, text: str) -> None:
        """Write text that needs no decision."""
        self.text += text

    def decide(self, symbol: str, among: str) -> str:
        """Write the correct symbol, one of `among`; return the final symbol."""
        self.decisions += 1
        self.put(symbol, symbol)
        return symbol

    def put(self, first: str, final: str) -> None:
        """Write a decision's first and final symbols."""
        self.text += f"{first}{CORRECTION}{final}" if self.twice else final


@dataclass
class NoisySolutionWriter(SolutionWriter):
    """Writer of a noisy solution; `expected` is the correct solution's number of decisions."""

    noise: Noise = field(kw_only=True)
    expected: int = field(kw_only=True)
    max_length: int = field(kw_only=True)  # characters
    generator: random.Random = field(kw_only=True)

    def decide(self, symbol: str, among: str) -> str:
        """Write the correct symbol, or an error at the noise's rate."""
        if len(self.text) > self.max_length:
            raise SolutionTooLongError
        progress = min(self.decisions / self.expected, 1 - 1e-9)
        self.decisions += 1
        if self.generator.random() >= self.noise.rate_at(progress):
            self.put(symbol, symbol)
            return symbol
        error = self.generator.choice([other for other in among if other != symbol])
        corrected = self.generator.random() < self.noise.corrected and self.twice
        final = symbol if corrected else error
        self.put(error, final)
        return final


def correct_solution(problem: Problem) -> str:
    """Return the solution without errors."""
    writer = SolutionWriter()
    problem.solve(writer)
    return writer.text


def correct_answer(problem: Problem) -> str:
    """Return the correct solution without first attempts."""
    return _CORRECTED.sub("", correct_solution(problem))


def count_decisions(problem: Problem) -> int:
    """Count the decisions in the correct solution."""
    writer = SolutionWriter()
    problem.solve(writer)
    return writer.decisions


def noisy_solution(problem: Problem, noise: Noise, generator: random.Random) -> str:
    """Return a solution with errors, truncated if it becomes too long."""
    correct = SolutionWriter()
    problem.solve(correct)
    writer = NoisySolutionWriter(
        noise=noise,
        expected=correct.decisions,
        max_length=MAX_LENGTH_RATIO * len(correct.text),
        generator=generator,
    )
    with contextlib.suppress(SolutionTooLongError):
        problem.solve(writer)
    return writer.text


def verify_trace(text: str, ground_truth: str, data_source: str) -> tuple[float, str, str | None]:
    """Return reward 1 if the solution is correct after its corrections, else 0, with a reason."""
    if text == ground_truth:
        return 1.0, "right", text
    corrected = _CORRECTED.sub("", text)
    if corrected == ground_truth:
        return 1.0, "right after corrections", corrected
    if ground_truth.startswith(corrected):
        return 0.0, "stops too early", corrected
    return 0.0, "wrong", corrected

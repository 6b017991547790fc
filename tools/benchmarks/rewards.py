"""How many answers a second the default verifier judges, on how many workers, and what slows it.

    PYTHONPATH=. python tools/benchmarks/rewards.py [--workers 2] [--answers 4000]

Answers as models write them to problems with short results: 60% integers, 20% fractions, 10%
expressions, 10% without an answer; half of those with one are right. `hostile` adds one answer in
a thousand that no parser ends with (a tower of powers), at a time limit of 1 s: while it waits, a
worker judges nothing else. The time is that of the pool, pipes and texts of 2,000 characters
included, not of starting it.
"""

import argparse
import random
import time

from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import TIME_LIMIT, Item

THOUGHT = "Let us see: the sum is what we need. " * 55


def make_answers(count: int, *, hostile: float = 0.0) -> list[Item]:
    """Responses with their ground truths."""
    chance = random.Random(0)
    items = []
    for _ in range(count):
        kind, a, b = chance.random(), chance.randrange(1, 5000), chance.randrange(2, 90)
        truth = str(a) if kind < 0.7 else rf"\frac{{{a}}}{{{b}}}" if kind < 0.9 else f"{a}x^2-{b}"
        answer = truth
        if chance.random() < 0.5:
            answer = {True: str(a + b), False: rf"\frac{{{a + 1}}}{{{b}}}"}[kind < 0.7]
        elif 0.7 <= kind < 0.8:
            answer = rf"\dfrac{{{a}}}{{{b}}}"  # equal, not the same text
        if chance.random() < hostile:
            answer = "9^{9^{9^{9}}}"
        boxed = "" if 0.6 <= kind < 0.7 else rf"Therefore \boxed{{{answer}}}."
        items.append(Item(THOUGHT + boxed, truth, "benchmark"))
    return items


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--answers", type=int, default=4000)
    options = parser.parse_args()
    print("answers        workers  answers/s  ran out of time")
    for name, hostile in (("ordinary", 0.0), ("hostile 1/1000", 0.001)):
        items = make_answers(options.answers, hostile=hostile)
        with VerifierPool(workers=options.workers, time_limit=1.0) as pool:
            pool.start()
            start = time.perf_counter()
            verdicts = pool.verify_all(items)
            seconds = time.perf_counter() - start
        late = sum(verdict.reason == TIME_LIMIT for verdict in verdicts)
        print(f"{name:<15}{options.workers:>7}{len(items) / seconds:>11,.0f}{late:>17}")


if __name__ == "__main__":
    main()

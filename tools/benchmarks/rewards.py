"""Answers per second that the default verifier grades, by number of workers.

    python -m tools.benchmarks.rewards [--workers 2] [--answers 4000]

The answers resemble model output for problems with short results: 60% integers, 20% fractions, 10%
expressions, 10% without an answer; half of the rest are correct. `hostile` adds one answer per
thousand that no parser finishes (a tower of powers), with a time limit of 1 s, during which its
worker grades nothing else. The time includes the pool, pipes and texts of 2,000 characters, but not
starting the pool. Eight responses share a ground truth, as in a group. The last column is computed
from the processor time of parent and workers, as answers per second on two cores, which load on
the machine affects little.
"""

import argparse
import random
import time

import psutil

from megatron_rl.config.sections import RewardSection
from megatron_rl.rewards.pool import VerifierPool
from megatron_rl.rewards.verifier import TIME_LIMIT, Item

THOUGHT = "Let us see: the sum is what we need. " * 55


def make_answers(count: int, *, hostile: float = 0.0) -> list[Item]:
    """Return responses with their ground truths."""
    chance = random.Random(0)
    items = []
    for place in range(count):
        if place % 8 == 0:
            kind, a, b = chance.random(), chance.randrange(1, 5000), chance.randrange(2, 90)
            truth = (
                str(a) if kind < 0.7 else rf"\frac{{{a}}}{{{b}}}" if kind < 0.9 else f"{a}x^2-{b}"
            )
        answer = truth
        if chance.random() < 0.5:
            c = chance.randrange(1, 90)
            answer = str(a + c) if kind < 0.7 else rf"\frac{{{a + c}}}{{{b}}}"
            answer = answer if kind < 0.9 else f"{a + c}x^2-{b}"
        elif 0.7 <= kind < 0.8:
            answer = rf"\dfrac{{{a}}}{{{b}}}"  # equal, not the same text
        if chance.random() < hostile:
            answer = "9^{9^{9^{9}}}"
        boxed = "" if 0.6 <= kind < 0.7 else rf"Therefore \boxed{{{answer}}}."
        items.append(Item(THOUGHT + boxed, truth, "benchmark"))
    return items


def cpu_seconds() -> float:
    """Return the processor time of this process and its workers."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--answers", type=int, default=4000)
    options = parser.parse_args()
    print("answers        workers  answers/s  ran out of time  on two full cores")
    for name, hostile in (("ordinary", 0.0), ("hostile 1/1000", 0.001)):
        items = make_answers(options.answers, hostile=hostile)
        with VerifierPool(RewardSection(workers=options.workers, time_limit_seconds=1.0)) as pool:
            pool.start()
            start, used = time.perf_counter(), cpu_seconds()
            verdicts = pool.verify_all(items)
            seconds, used = time.perf_counter() - start, cpu_seconds() - used
        late = sum(verdict.reason == TIME_LIMIT for verdict in verdicts)
        rates = len(items) / seconds, 2 * len(items) / used
        # The processor time of a replaced worker is lost.
        whole = "-" if late else f"{rates[1]:,.0f}"
        print(f"{name:<15}{options.workers:>7}{rates[0]:>11,.0f}{late:>17}{whole:>20}")


if __name__ == "__main__":
    main()

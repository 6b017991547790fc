"""Verifiers in worker processes, with a hard time limit for each call.

A model's output can make a verifier run for hours (`100000000!`) or use all memory, inside C code
that no exception interrupts. Such a process is killed, the response gets no reward, and a new one
is forked.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.config.sections import RewardSection, WorkersSection
from megatron_rl.errors import UserError
from megatron_rl.rewards.verifier import FAILED, MATH_ANSWER, TIME_LIMIT, Item, VerifierError
from megatron_rl.rewards.worker import LARGEST_REWARD, as_number, format_value
from megatron_rl.types import GradeResult
from megatron_rl.workers.client import FailureCounts, Workers

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # delay before each retry
ALIVE_SECONDS = 10.0  # without a sign of life from the manager of the workers
MOST_LINES = 100  # printed lines of each batch
_LOOK_SECONDS = 1.0  # between two reports of progress


class VerifierPool(Workers):
    """The worker processes of a verifier, kept for all steps.

    workers: limits of their processes; cores: their number, unless the settings say how many. echo:
    receives the first lines that the verifier prints for each batch.
    """

    def __init__(
        self,
        settings: RewardSection,
        workers: WorkersSection | None = None,
        *,
        cores: int = 1,
        echo: Callable[[str], object] | None = None,
    ) -> None:
        self.settings, name = settings, settings.verifier or MATH_ANSWER
        workers = workers or WorkersSection()
        self.named = NamedRewards(settings.weights, verifier=name)
        self.num_graded = 0  # total number of results, to detect progress
        self.keys = itertools.count()  # never used again, so no late answer goes to another batch
        self.in_progress = 0
        super().__init__(
            "megatron_rl.rewards.broker",
            {
                "load": "megatron_rl.rewards.worker:load",
                "name": name,
                "workers": settings.workers or cores,
                "batch_size": settings.batch_size,
                "time_limit": settings.time_limit_seconds,
                "memory_gib": workers.memory_gib,
                "longest_line": 2000,
                "most_lines": MOST_LINES,
            },
            variables=workers.variables,
            error=VerifierError,
            echo=echo,
        )

    def try_on(self, item: Item) -> list[GradeResult]:
        """Grade the ground truth and an empty response as a trial, and return both results.

        Raises VerifierError if the verifier fails or exceeds the time limit.
        """
        session = GradingSession(self, on_error="end")
        session.submit_all(enumerate(item._replace(text=text) for text in (item.ground_truth, "")))
        grade_results = list(session.finish().values())
        if any(grade_result.reason == TIME_LIMIT for grade_result in grade_results):
            raise VerifierError(
                f"{self.name} did not grade a response within reward.time_limit_seconds="
                f"{self.settings.time_limit_seconds:g} in a trial; raise it, or let the module "
                "load what is slow"
            )
        return grade_results

    def begin(self) -> "GradingSession":
        """Begin to grade responses while further responses are generated; one session at a time."""
        return GradingSession(self, on_error=self.settings.on_error)

    def verify_all(self, items: Sequence[Item]) -> list[GradeResult]:
        """Grade all items, in order (`GradingSession`)."""
        session = self.begin()
        session.submit_all(enumerate(items))
        return list(session.finish().values())

    @property
    def is_within_limits(self) -> bool:
        """True if calls are in progress and their manager, which ends each in time, is alive."""
        return bool(self.in_progress) and time.monotonic() - self.last_message_at < ALIVE_SECONDS


class GradingSession:
    """Grades items from the moment they are submitted; one session of a pool at a time.

    A call over the time limit gives `GradeResult(0.0, TIME_LIMIT, None)`. `on_error` applies if the
    verifier's code raises, if it returns no reward, or if its process dies twice on the same
    response: `end` raises VerifierError; `zero` gives reward 0 with the reason `FAILED`; `retry`
    tries again after 1, 2, 4, 8 and 16 s, then raises VerifierError. A result depends only on its
    item, not on the order of submission.
    """

    def __init__(self, pool: VerifierPool, *, on_error: str) -> None:
        if pool.is_closed:
            raise ValueError("the verifier pool is closed")
        self._pool, self._on_error = pool, on_error
        self._places: dict[int, tuple[int, Item]] = {}  # by key, of calls in progress
        self._results: dict[int, GradeResult] = {}  # by place
        self._order: list[int] = []
        self._attempts: Counter[int] = Counter()  # failed ones, by place
        self._delayed: list[tuple[float, int, Item]] = []  # the time of the next attempt
        self._failures = FailureCounts()  # those that did not end the session
        self._causes = FailureCounts()  # the same by kind, and calls over the time limit
        pool.write({"renew": True})

    def submit(self, place: int, item: Item) -> None:
        """Submit an item for grading; raise the error of an earlier item, if any."""
        self.submit_all([(place, item)])
        self._receive(0.0)

    def submit_all(self, items: Iterable[tuple[int, Item]]) -> None:
        """Submit items with their places."""
        self._pool.start()
        submitted = list(items)
        self._order += [place for place, _ in submitted]
        for place, item in submitted:
            self._send(place, item)

    def finish(
        self, *, on_progress: Callable[[int], object] = lambda num_graded: None
    ) -> dict[int, GradeResult]:
        """Wait for all results and return them by place, in the order of submission.

        Raises the first error. on_progress: called about once per second with the total number of
        results of the pool.
        """
        while len(self._results) < len(self._order):
            on_progress(self._pool.num_graded)
            now = time.monotonic()
            wait = min([_LOOK_SECONDS, *(max(one[0] - now, 0.0) for one in self._delayed)])
            self._receive(wait)
        for line in (*self._causes.pop_lines(), *self._failures.pop_lines()):
            self._pool.note(line)
        return {place: self._results[place] for place in self._order}

    def _send(self, place: int, item: Item) -> None:
        key = next(self._pool.keys)
        self._places[key] = place, item
        self._pool.write({"grade": key, "item": item})

    def _receive(self, timeout: float) -> None:
        try:
            for message in self._pool.receive(timeout):
                found = self._places.pop(message["key"], None)
                if found is not None:  # else of a session that has failed
                    self._pool.num_graded += 1
                    self._on_message(*found, message)
            due = [one for one in self._delayed if one[0] <= time.monotonic()]
            self._delayed = [one for one in self._delayed if one not in due]
            for _, place, item in due:
                self._send(place, item)
        except BaseException:
            if not self._pool.is_closed:
                self._pool.write({"cancel": True})
            self._places.clear()
            raise
        finally:
            self._pool.in_progress = len(self._places)

    def _on_message(self, place: int, item: Item, message: dict[str, Any]) -> None:
        what = self._describe(place, item)
        if "is_late" in message:
            limit = f"{self._pool.settings.time_limit_seconds:g} s"
            self._causes.add("responses: time limit", f"{what}: it took longer than {limit}")
            self._keep(place, GradeResult(0.0, TIME_LIMIT, None))
        elif "died" in message:
            self._fail(
                place,
                item,
                "responses: its process died",
                f"{what}: its process died twice, {message['died']}",
            )
        elif isinstance(message["answer"], dict):
            self._fail(
                place,
                item,
                "responses: the verifier failed",
                f"{what}:\n{message['answer']['error']}",
            )
        else:
            reward, reason, extracted = message["answer"]
            try:
                reward, rewards = self._pool.named.add_up(reward)
            except ValueError as error:
                self._fail(place, item, "responses: the verifier failed", f"{what}:\n{error}")
            else:
                self._keep(place, GradeResult(reward, reason, extracted, rewards=rewards))

    def _keep(self, place: int, grade_result: GradeResult) -> None:
        self._results[place] = replace(grade_result, retries=self._attempts[place])

    def _fail(self, place: int, item: Item, kind: str, why: str) -> None:
        if self._on_error == "end":
            raise VerifierError(why)
        if self._on_error == "retry":
            attempts = self._attempts[place]
            if attempts == len(RETRY_SECONDS):
                raise VerifierError(f"after {len(RETRY_SECONDS)} new attempts, {why}")
            self._delayed.append((time.monotonic() + RETRY_SECONDS[attempts], place, item))
            self._attempts[place] += 1
        else:
            self._keep(place, GradeResult(0.0, FAILED, None))
        self._failures.add("grades failed", why)
        self._causes.add(kind, why)

    def _describe(self, place: int, item: Item) -> str:
        return (
            f"the verifier failed on response {place} of {len(self._order)} ({item.data_source}, "
            f"ground truth {item.ground_truth!r:.60}, response ending in {item.text[-60:]!r})"
        )


class NamedRewards:
    """The weighted sum of the rewards that a verifier returns by name.

    weights: by name; if empty, 1 for each. Every response must have the same names, so that the
    means of all rewards cover the same responses.
    """

    def __init__(self, weights: Mapping[str, float], *, verifier: str) -> None:
        self._weights, self._verifier = dict(weights), verifier
        self._names: list[str] | None = sorted(weights) if weights else None

    def add_up(self, reward: float | Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Return the weighted sum and the rewards by name (none for a single number).

        Raises ValueError if a name is missing or unknown, or if the sum is too large.
        """
        rewards = dict(reward) if isinstance(reward, Mapping) else {}
        if self._names is None:
            self._names = sorted(rewards)
        if sorted(rewards) != self._names:
            raise UserError(self._describe_difference(sorted(rewards)))
        if not isinstance(reward, Mapping):
            return reward, {}
        # Exactly rounded, so that the order of the names does not matter.
        products = [self._weights.get(name, 1.0) * value for name, value in rewards.items()]
        # nan and inf are no summands: fsum would raise an error of its own.
        total = math.fsum(products) if all(map(math.isfinite, products)) else math.nan
        if as_number(total) is None:
            raise UserError(
                f"the weighted sum of {self._verifier}'s rewards {format_value(rewards)} is above "
                f"{LARGEST_REWARD:g}; return smaller ones, or lower reward.weights"
            )
        return total, rewards

    def _describe_difference(self, names: list[str]) -> str:
        returned = f"rewards named {', '.join(names)}" if names else "a single reward"
        expected = ", ".join(self._names or ())
        if self._weights:
            return (
                f"{self._verifier} returned {returned}, and reward.weights has {expected}; give "
                "each reward that it returns one weight, and no other name"
            )
        return (
            f"{self._verifier} returned {returned} for this response and "
            f"{expected or 'a single reward'} for an earlier one; return the same names for every "
            "response, with 0 where one does not apply"
        )

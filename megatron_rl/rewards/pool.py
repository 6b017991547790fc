"""Verifiers in worker processes, with a hard time limit for each call.

A model's output can make a verifier run for hours (`100000000!`) or use all memory, inside C code
that no exception interrupts. The parent process therefore measures the time and kills a worker
that exceeds the limit; the response gets no reward, and a new worker starts.
"""

import math
import os
import selectors
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from megatron_rl.rewards.named import NamedRewards
from megatron_rl.rewards.process import (
    START_SECONDS,
    PrintedLines,
    WorkerProcess,
    worker_environment,
)
from megatron_rl.rewards.verifier import FAILED, MATH_ANSWER, TIME_LIMIT, Item, VerifierError
from megatron_rl.types import GradeResult

READ_BYTES = 1 << 16
MORE_SECONDS = 0.02  # between polls for further items
LONGEST_LINE, MOST_LINES = 2000, 100  # printed: characters of a line, lines for each batch
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # delay before each retry

OnError = Literal["end", "zero", "retry"]


class VerifierPool:
    """Worker processes that grade responses, started immediately and kept for all steps.

    time_limit: limit of one call in seconds.
    batch_size: maximum responses per call, for a verifier that takes several.
    on_error: reaction to a response on which the verifier fails. `end` raises VerifierError; `zero`
    gives reward 0 with the reason `FAILED`; `retry` tries again after 1, 2, 4, 8 and 16 s, then
    raises VerifierError. environment: names of additional environment variables for the verifier.
    weights: weights of named rewards. memory_gib: address space of a worker; None: no limit.
    echo: receives the first lines that the verifier prints in each call of `verify_all`.
    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        time_limit: float = 5.0,
        verifier: str = MATH_ANSWER,
        batch_size: int = 32,
        on_error: OnError = "end",
        environment: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
        memory_gib: float | None = 4.0,
        echo: Callable[[str], object] = lambda line: print(line, file=sys.stderr),  # noqa: T201
    ) -> None:
        if workers < 1 or time_limit <= 0:
            raise ValueError(f"need workers >= 1 and time_limit > 0, got {workers}, {time_limit}")
        self.verifier, self.time_limit = verifier, time_limit
        self._batch_size, self.on_error, self._echo = batch_size, on_error, echo
        self._command = [
            *(sys.executable, "-m", "megatron_rl.rewards.worker", "--verifier", verifier),
            *("--time-limit", str(time_limit), "--parent", str(os.getpid())),
            *(() if memory_gib is None else ("--memory-gib", str(memory_gib))),
        ]
        self._named = NamedRewards(weights or {}, verifier=verifier)
        self._environment = worker_environment(environment)
        # A worker ends with the thread that started it (for the kernel, threads are parents), so
        # all are started by one thread that lives as long as the pool.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starts verifiers")
        self.num_graded = 0  # total number of results, to detect progress
        self._printed = PrintedLines(
            lambda line: echo(f"{verifier}: {line}"), longest=LONGEST_LINE, most=MOST_LINES
        )
        self._workers = [self._start_worker() for _ in range(workers)]

    def start(self) -> None:
        """Wait until every worker has loaded the verifier; raise VerifierError if one fails."""
        nothing = _Batch([], self._named, on_error=self.on_error)
        with selectors.DefaultSelector() as selector:
            while not all(worker.is_ready for worker in self._workers):
                self._assign_items(nothing, selector)
                self._collect(nothing, selector)

    def try_on(self, item: Item) -> list[GradeResult]:
        """Grade the ground truth and an empty response as a trial, and return both results.

        Raises VerifierError if the verifier fails or exceeds the time limit.
        """
        texts = (item.ground_truth, "")
        grade_results = self._verify([item._replace(text=text) for text in texts], on_error="end")
        if any(grade_result.reason == TIME_LIMIT for grade_result in grade_results):
            raise VerifierError(
                f"{self.verifier} did not grade a response within reward.time_limit_seconds="
                f"{self.time_limit:g} in a trial; raise it, or let the module load what is slow"
            )
        return grade_results

    def verify_all(
        self, items: Sequence[Item], *, more: Callable[[], Sequence[Item]] | None = None
    ) -> list[GradeResult]:
        """Grade all items, in order; `more` is polled for further items until all are graded.

        A call that exceeds the time limit gives `GradeResult(0.0, TIME_LIMIT, None)`. Raises
        VerifierError if the verifier does not start. `on_error` applies if its code raises, if it
        returns no reward, or if its process dies twice on the same response.
        """
        return self._verify(items, on_error=self.on_error, more=more)

    @property
    def is_within_limits(self) -> bool:
        """True if calls are in progress and none exceeds its time limit; thread-safe."""
        busy = [worker.deadline for worker in list(self._workers) if worker.places]
        return bool(busy) and time.monotonic() <= min(busy)

    def close(self) -> None:
        """Stop the workers."""
        if not self._workers:
            return
        for worker in self._workers:
            worker.stop()
        self._workers = []
        self._starter.shutdown()
        self._printed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _verify(
        self,
        items: Sequence[Item],
        *,
        on_error: OnError,
        more: Callable[[], Sequence[Item]] | None = None,
    ) -> list[GradeResult]:
        if not self._workers:
            raise ValueError("the verifier pool is closed")
        self._printed.renew()
        batch = _Batch(list(items), self._named, on_error=on_error)
        try:
            with selectors.DefaultSelector() as selector:
                while batch.unfinished:
                    if more is not None:
                        batch.add(more())
                    batch.take_up_delayed()
                    self._assign_items(batch, selector)
                    self._collect(batch, selector, patience=MORE_SECONDS if more else math.inf)
        except BaseException:
            self._restart_busy()  # otherwise their late answers would go to the next batch
            raise
        if batch.failures:
            count = len(batch.failures)
            self._echo(f"{self.verifier}: {count} grades failed; the first: {batch.failures[0]}")
        return [batch.grade_results[place] for place in range(len(batch.items))]

    def _start_worker(self) -> WorkerProcess:
        start = self._starter.submit(WorkerProcess, self._command, self._printed, self._environment)
        return start.result()

    def _assign_items(self, batch: "_Batch", selector: selectors.BaseSelector) -> None:
        for worker in self._workers:
            if worker.is_ready and not worker.places and batch.waiting:
                share = -(-len(batch.waiting) // len(self._workers))
                most = min(self._batch_size, share) if worker.takes_many else 1
                places = batch.take(most)
                items = [batch.items[place] for place in places]
                worker.send(places, items, time_limit=self.time_limit)
            if worker.is_waited_for and worker.output not in selector.get_map():
                selector.register(worker.output, selectors.EVENT_READ, worker)

    def _collect(
        self, batch: "_Batch", selector: selectors.BaseSelector, *, patience: float = math.inf
    ) -> None:
        watched = [key.data for key in selector.get_map().values()]
        moments = [worker.deadline for worker in watched] + [*batch.delayed.values()]
        patience = max(min(min(moments) - time.monotonic(), patience), 0)
        if not watched:  # all remaining items wait for a retry
            time.sleep(patience)
            return
        for key, _ in selector.select(patience):
            self._read(key.data, batch, selector)
        for worker in watched:
            if worker.is_waited_for and time.monotonic() > worker.deadline:
                if not worker.places:
                    raise VerifierError(f"a verifier did not start in {START_SECONDS:.0f} s")
                if not batch.take_back(worker.places):
                    batch.finish(worker.places[0], GradeResult(0.0, TIME_LIMIT, None))
                self.num_graded += 1
                self._replace(worker, selector)

    def _read(
        self, worker: WorkerProcess, batch: "_Batch", selector: selectors.BaseSelector
    ) -> None:
        chunk = os.read(worker.output.fileno(), READ_BYTES)
        if not chunk:
            end = worker.describe_end()
            if not worker.places:
                raise VerifierError(f"a verifier did not start ({end}); its output is in the log")
            if not batch.take_back(worker.places):
                batch.retry_death(worker.places[0], end)
            self._replace(worker, selector)
            return
        lines = worker.take(chunk)
        if not lines:
            return
        (answer,) = lines
        places, worker.places = worker.places, []
        if not worker.is_ready:
            if "error" in answer:
                raise VerifierError(f"{self.verifier} did not start:\n{answer['error']}")
            worker.get_ready(answer)
        else:
            batch.take_answers(places, answer)
            self.num_graded += len(places)
        selector.unregister(worker.output)

    def _replace(self, worker: WorkerProcess, selector: selectors.BaseSelector) -> None:
        selector.unregister(worker.output)
        worker.kill()
        self._workers[self._workers.index(worker)] = self._start_worker()

    def _restart_busy(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker.places or worker.has_ended:
                worker.kill()
                self._workers[index] = self._start_worker()


@dataclass
class _Batch:
    """Items of one call and their state."""

    items: list[Item]
    named: NamedRewards
    on_error: OnError
    grade_results: dict[int, GradeResult] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # failures that did not end the call
    _attempts: Counter[int] = field(default_factory=Counter)  # failed attempts, by place
    _died: set[int] = field(default_factory=set)
    _alone: set[int] = field(default_factory=set)  # items of failed batches, graded one by one
    delayed: dict[int, float] = field(default_factory=dict)  # place: time of the next attempt

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.items)))

    def add(self, items: Sequence[Item]) -> None:
        """Append further items."""
        self.waiting.extend(range(len(self.items), len(self.items) + len(items)))
        self.items.extend(items)

    @property
    def unfinished(self) -> bool:
        return len(self.grade_results) < len(self.items)

    def take_up_delayed(self) -> None:
        now = time.monotonic()
        for place in [place for place, moment in self.delayed.items() if moment <= now]:
            del self.delayed[place]
            self.waiting.append(place)

    def take(self, most: int) -> list[int]:
        """Take the next places to grade in one call."""
        places = [self.waiting.popleft()]
        while (
            len(places) < most and self.waiting and not {places[0], self.waiting[0]} & self._alone
        ):
            places.append(self.waiting.popleft())
        return places

    def take_back(self, places: list[int]) -> bool:
        """Grade several items one by one if one of them failed; False for a single item."""
        if len(places) > 1:
            self._alone.update(places)
            self.waiting.extendleft(reversed(places))
        return len(places) > 1

    def take_answers(self, places: list[int], answers: Any) -> None:
        """Process a worker's answers, or the dict of a call that failed as a whole."""
        if isinstance(answers, dict) and self.take_back(places):
            return
        each = [answers] if isinstance(answers, dict) else answers
        for place, answer in zip(places, each, strict=True):
            if isinstance(answer, dict):
                self._fail(place, f"{self._describe(place)}:\n{answer['error']}")
            else:
                self._take_answer(place, *answer)

    def _take_answer(self, place: int, reward: Any, reason: str, extracted: str | None) -> None:
        rewards: dict[str, float] = {}
        if reason != TIME_LIMIT:  # from an async verifier: no named rewards
            try:
                reward, rewards = self.named.add_up(reward)
            except ValueError as error:
                self._fail(place, f"{self._describe(place)}:\n{error}")
                return
        self.finish(place, GradeResult(reward, reason, extracted, rewards=rewards))

    def finish(self, place: int, grade_result: GradeResult) -> None:
        self.grade_results[place] = replace(grade_result, retries=self._attempts[place])

    def retry_death(self, place: int, end: str) -> None:
        """Retry once: a process may be killed because the machine is short of memory."""
        if place in self._died:
            self._fail(place, f"{self._describe(place)}: its process died twice, {end}")
        else:
            self._died.add(place)
            self.waiting.appendleft(place)

    def _fail(self, place: int, why: str) -> None:
        if self.on_error == "end":
            raise VerifierError(why)
        if self.on_error == "retry":
            if self._attempts[place] == len(RETRY_SECONDS):
                raise VerifierError(f"after {len(RETRY_SECONDS)} new attempts, {why}")
            self.delayed[place] = time.monotonic() + RETRY_SECONDS[self._attempts[place]]
            self._attempts[place] += 1
        else:
            self.finish(place, GradeResult(0.0, FAILED, None))
        self.failures.append(why)

    def _describe(self, place: int) -> str:
        text, ground_truth, data_source, _ = self.items[place]
        return (
            f"the verifier failed on response {place} of {len(self.items)} ({data_source}, ground "
            f"truth {ground_truth!r:.60}, response ending in {text[-60:]!r})"
        )

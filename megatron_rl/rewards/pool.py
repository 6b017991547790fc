"""Verifiers in worker processes, each judgement under a hard time limit.

What a model writes can make a verifier run for hours (`100000000!`) or take all memory, inside C
code that no exception reaches. So the parent counts the time and kills the worker that exceeds
it; the response gets no reward, and a new worker takes over.
"""

import math
import os
import selectors
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from megatron_rl.rewards.process import (
    START_SECONDS,
    PrintedLines,
    WorkerProcess,
    worker_environment,
)
from megatron_rl.rewards.verifier import FAILED, MATH_ANSWER, TIME_LIMIT, Item, VerifierError
from megatron_rl.types import Verdict

READ_BYTES = 1 << 16
MORE_SECONDS = 0.02  # between looks for further items
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # what passes before each new attempt

OnError = Literal["end", "zero", "retry"]


class VerifierPool:
    """Worker processes that judge responses; started at once, kept from step to step.

    time_limit: seconds one call may take.
    batch_size: responses that a worker is given at once, where the verifier takes many.
    on_error: what becomes of a response that the verifier fails on. `end`: VerifierError; `zero`:
    no reward, with the reason `FAILED`; `retry`: new attempts after 1, 2, 4, 8 and 16 s, then
    VerifierError. environment: names of variables that the verifier sees besides ordinary ones.
    say: takes each line that the verifier prints.
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
        say: Callable[[str], object] = lambda line: print(line, file=sys.stderr),  # noqa: T201
    ) -> None:
        if workers < 1 or time_limit <= 0:
            raise ValueError(f"need workers >= 1 and time_limit > 0, got {workers}, {time_limit}")
        self.verifier, self.time_limit = verifier, time_limit
        self._batch_size, self._on_error, self._say = batch_size, on_error, say
        self._command = [
            *(sys.executable, "-m", "megatron_rl.rewards.worker", "--verifier", verifier),
            *("--time-limit", str(time_limit), "--parent", str(os.getpid())),
        ]
        self._environment = worker_environment(environment)
        # A worker ends with the thread that has started it (the kernel counts threads as parents),
        # and others than this one come and go.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starts verifiers")
        self.judged = 0  # in all, for whoever looks whether there is progress
        self._printed = PrintedLines(lambda line: say(f"{verifier}: {line}"))
        self._workers = [self._start_worker() for _ in range(workers)]

    def start(self) -> None:
        """Wait until every worker has loaded the verifier, so that a wrong one is noticed early.

        Raises VerifierError if one does not.
        """
        nothing = _Batch([], on_error=self._on_error)
        with selectors.DefaultSelector() as selector:
            while not all(worker.is_ready for worker in self._workers):
                self._hand_out(nothing, selector)
                self._collect(nothing, selector)

    def try_on(self, item: Item) -> None:
        """Judge the ground truth itself and an empty response, as a trial of the verifier.

        Raises VerifierError where it fails, or takes longer than a call may take.
        """
        texts = (item.ground_truth, "")
        verdicts = self._verify([item._replace(text=text) for text in texts], on_error="end")
        if any(verdict.reason == TIME_LIMIT for verdict in verdicts):
            raise VerifierError(
                f"{self.verifier} did not judge a response within reward.time_limit_seconds="
                f"{self.time_limit:g} in a trial; raise it, or let the module load what is slow"
            )

    def verify_all(
        self, items: Sequence[Item], *, more: Callable[[], Sequence[Item]] | None = None
    ) -> list[Verdict]:
        """A verdict for each item, in order; `more` is asked for further ones until all are judged.

        A judgement that exceeds the time limit is the verdict `Verdict(0.0, TIME_LIMIT, None)`.
        Raises VerifierError if it does not start, and as `on_error` says if its code raises, if it
        returns no verdict, or if its process dies twice over the same response.
        """
        return self._verify(items, on_error=self._on_error, more=more)

    def close(self) -> None:
        """End the workers."""
        if not self._workers:
            return
        for worker in self._workers:
            worker.stop()
        self._workers = []
        self._starter.shutdown()
        self._printed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _verify(
        self,
        items: Sequence[Item],
        *,
        on_error: OnError,
        more: Callable[[], Sequence[Item]] | None = None,
    ) -> list[Verdict]:
        if not self._workers:
            raise ValueError("the verifier pool is closed")
        batch = _Batch(list(items), on_error=on_error)
        try:
            with selectors.DefaultSelector() as selector:
                while batch.unfinished:
                    if more is not None:
                        batch.add(more())
                    batch.take_up_delayed()
                    self._hand_out(batch, selector)
                    self._collect(batch, selector, patience=MORE_SECONDS if more else math.inf)
        except BaseException:
            self._restart_busy()  # or their late answers would be taken for the next batch's
            raise
        if batch.failures:
            count = len(batch.failures)
            self._say(f"{self.verifier}: {count} judgements failed; the first: {batch.failures[0]}")
        return batch.in_order()

    def _start_worker(self) -> WorkerProcess:
        start = self._starter.submit(WorkerProcess, self._command, self._printed, self._environment)
        return start.result()

    def _hand_out(self, batch: "_Batch", selector: selectors.BaseSelector) -> None:
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
        moments = [worker.deadline for worker in watched] + batch.delayed_until
        patience = max(min(min(moments) - time.monotonic(), patience), 0)
        if not watched:  # all that is left waits for a new attempt
            time.sleep(patience)
            return
        for key, _ in selector.select(patience):
            self._read(key.data, batch, selector)
        for worker in watched:
            if worker.is_waited_for and time.monotonic() > worker.deadline:
                if not worker.places:
                    raise VerifierError(f"a verifier did not start in {START_SECONDS:.0f} s")
                if not batch.take_back(worker.places):
                    batch.finish(worker.places[0], Verdict(0.0, TIME_LIMIT, None))
                self.judged += 1
                self._replace(worker, selector)

    def _read(
        self, worker: WorkerProcess, batch: "_Batch", selector: selectors.BaseSelector
    ) -> None:
        chunk = os.read(worker.output.fileno(), READ_BYTES)
        if not chunk:
            end = worker.describe_end()
            if not worker.places:
                raise VerifierError(f"a verifier did not start ({end}); the log has what it said")
            if not batch.take_back(worker.places):
                batch.retry_death(worker.places[0], end)
            self._replace(worker, selector)
            return
        answer = worker.take(chunk)
        if answer is None:
            return
        places, worker.places = worker.places, []
        if not worker.is_ready:
            if "error" in answer:
                raise VerifierError(f"{self.verifier} did not start:\n{answer['error']}")
            worker.get_ready(answer)
        else:
            batch.take_answers(places, answer)
            self.judged += len(places)
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
    """Items of one call and what has become of them."""

    items: list[Item]
    on_error: OnError
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # those that did not end the call
    _attempts: Counter[int] = field(default_factory=Counter)  # that failed, by place
    _died: set[int] = field(default_factory=set)
    _alone: set[int] = field(default_factory=set)  # what failed in company is judged without it
    _delayed: dict[int, float] = field(default_factory=dict)  # place: when to try again

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.items)))

    def add(self, items: Sequence[Item]) -> None:
        """Judge these too, after the others."""
        self.waiting.extend(range(len(self.items), len(self.items) + len(items)))
        self.items.extend(items)

    @property
    def unfinished(self) -> bool:
        return len(self.verdicts) < len(self.items)

    @property
    def delayed_until(self) -> list[float]:
        return list(self._delayed.values())

    def take_up_delayed(self) -> None:
        now = time.monotonic()
        for place in [place for place, moment in self._delayed.items() if moment <= now]:
            del self._delayed[place]
            self.waiting.append(place)

    def take(self, most: int) -> list[int]:
        """The next places to judge in one call."""
        places = [self.waiting.popleft()]
        while (
            len(places) < most and self.waiting and not {places[0], self.waiting[0]} & self._alone
        ):
            places.append(self.waiting.popleft())
        return places

    def take_back(self, places: list[int]) -> bool:
        """Have each judged alone, where it is not known which of several was at fault."""
        if len(places) > 1:
            self._alone.update(places)
            self.waiting.extendleft(reversed(places))
        return len(places) > 1

    def take_answers(self, places: list[int], answers: Any) -> None:
        """A worker's answers; a dict where the call as a whole has failed."""
        if isinstance(answers, dict) and self.take_back(places):
            return
        each = [answers] if isinstance(answers, dict) else answers
        for place, answer in zip(places, each, strict=True):
            if isinstance(answer, dict):
                self._fail(place, f"{self._describe(place)}:\n{answer['error']}")
            else:
                self.finish(place, Verdict(*answer))

    def finish(self, place: int, verdict: Verdict) -> None:
        attempts = self._attempts[place]
        self.verdicts[place] = Verdict(
            verdict.reward, verdict.reason, verdict.extracted, retries=attempts
        )

    def retry_death(self, place: int, end: str) -> None:
        """Once: a process may be the victim of a machine short of memory."""
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
            self._delayed[place] = time.monotonic() + RETRY_SECONDS[self._attempts[place]]
            self._attempts[place] += 1
        else:
            self.finish(place, Verdict(0.0, FAILED, None))
        self.failures.append(why)

    def _describe(self, place: int) -> str:
        text, ground_truth, data_source, _ = self.items[place]
        return (
            f"the verifier failed on response {place} of {len(self.items)} ({data_source}, ground "
            f"truth {ground_truth!r:.60}, response ending in {text[-60:]!r})"
        )

    def in_order(self) -> list[Verdict]:
        return [self.verdicts[place] for place in range(len(self.items))]

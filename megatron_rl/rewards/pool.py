"""Verifiers in worker processes, each judgement under a hard time limit.

What a model writes can make a verifier run for hours (`100000000!`) or take all memory, inside C
code that no exception reaches. So the parent counts the time and kills the worker that exceeds
it; the response gets no reward, and a new worker takes over.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self

from megatron_rl.rewards.verifier import MATH_ANSWER, TIME_LIMIT, VerifierError
from megatron_rl.types import Verdict

START_SECONDS = 120.0  # to import the verifier: on a crowded machine, sympy from a slow disk
READ_BYTES = 1 << 16

Item = tuple[str, str, str]  # response text, ground truth, data source


class VerifierPool:
    """Worker processes that judge responses; started at once, kept from step to step.

    time_limit: seconds one judgement may take. memory_limit: bytes of address space of a worker.
    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        time_limit: float = 5.0,
        memory_limit: int = 4 << 30,
        verifier: str = MATH_ANSWER,
    ) -> None:
        if workers < 1 or time_limit <= 0:
            raise ValueError(f"need workers >= 1 and time_limit > 0, got {workers}, {time_limit}")
        self.time_limit = time_limit
        self._command = [
            *(sys.executable, "-m", "megatron_rl.rewards.worker", "--verifier", verifier),
            *("--time-limit", str(time_limit), "--memory-limit", str(memory_limit)),
        ]
        self._workers = [_Worker(self._command) for _ in range(workers)]

    def start(self) -> None:
        """Wait until every worker has loaded the verifier, so that a wrong one is noticed early.

        Raises VerifierError if one does not.
        """
        nothing = _Batch([])
        with selectors.DefaultSelector() as selector:
            while not all(worker.is_ready for worker in self._workers):
                self._hand_out(nothing, selector)
                self._collect(nothing, selector)

    def verify_all(self, items: Sequence[Item]) -> list[Verdict]:
        """A verdict for each (response text, ground truth, data source), in order.

        A judgement that exceeds the time limit is the verdict `Verdict(0.0, TIME_LIMIT, None)`.
        Raises VerifierError if the verifier's code raises, if its process dies twice over the
        same response, or if it does not start.
        """
        if not self._workers:
            raise ValueError("the verifier pool is closed")
        batch = _Batch(items)
        try:
            with selectors.DefaultSelector() as selector:
                while batch.unfinished:
                    self._hand_out(batch, selector)
                    self._collect(batch, selector)
        except BaseException:
            self._restart_busy()  # or their late answers would be taken for the next batch's
            raise
        return batch.in_order()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _hand_out(self, batch: "_Batch", selector: selectors.BaseSelector) -> None:
        for worker in self._workers:
            if worker.is_ready and worker.place is None and batch.waiting:
                place = batch.waiting.popleft()
                worker.send(place, batch.items[place], deadline=time.monotonic() + self.time_limit)
            watched = worker.output in selector.get_map()
            if (worker.place is not None or not worker.is_ready) and not watched:
                selector.register(worker.output, selectors.EVENT_READ, worker)

    def _collect(self, batch: "_Batch", selector: selectors.BaseSelector) -> None:
        watched = [key.data for key in selector.get_map().values()]
        patience = min(worker.deadline for worker in watched) - time.monotonic()
        for key, _ in selector.select(max(patience, 0)):
            self._read(key.data, batch, selector)
        for worker in watched:
            if worker.is_waited_for and time.monotonic() > worker.deadline:
                if worker.place is None:
                    raise VerifierError(f"a verifier did not start in {START_SECONDS:.0f} s")
                batch.finish(worker.place, Verdict(0.0, TIME_LIMIT, None))
                self._replace(worker, selector)

    def _read(self, worker: "_Worker", batch: "_Batch", selector: selectors.BaseSelector) -> None:
        chunk = os.read(worker.output.fileno(), READ_BYTES)
        if not chunk:
            if worker.place is None:
                raise VerifierError(f"a verifier did not start ({worker.describe_end()})")
            batch.retry(worker.place, worker.describe_end())
            self._replace(worker, selector)
            return
        answer = worker.take(chunk)
        if answer is None:
            return
        place, worker.place = worker.place, None
        if place is None:
            worker.is_ready = True
        elif isinstance(answer, dict):
            raise VerifierError(f"{batch.describe(place)}:\n{answer['traceback']}")
        else:
            batch.finish(place, Verdict(*answer))
        selector.unregister(worker.output)

    def _replace(self, worker: "_Worker", selector: selectors.BaseSelector) -> None:
        selector.unregister(worker.output)
        worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(self._command)

    def _restart_busy(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker.place is not None or worker.has_ended:
                worker.kill()
                self._workers[index] = _Worker(self._command)


@dataclass
class _Batch:
    """Items of one call and what has become of them."""

    items: Sequence[Item]
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.items)))

    @property
    def unfinished(self) -> bool:
        return len(self.verdicts) < len(self.items)

    def finish(self, place: int, verdict: Verdict) -> None:
        self.verdicts[place] = verdict

    def retry(self, place: int, end: str) -> None:
        """Once: a process may be the victim of a machine short of memory."""
        if place in self.retried:
            raise VerifierError(f"{self.describe(place)}: its process died twice, {end}")
        self.retried.add(place)
        self.waiting.appendleft(place)

    def describe(self, place: int) -> str:
        text, ground_truth, data_source = self.items[place]
        return (
            f"the verifier failed on response {place} of {len(self.items)} ({data_source}, ground "
            f"truth {ground_truth!r:.60}, response ending in {text[-60:]!r})"
        )

    def in_order(self) -> list[Verdict]:
        return [self.verdicts[place] for place in range(len(self.items))]


class _Worker:
    """One process; `place` is the item it is judging, None while it starts or has nothing to do."""

    def __init__(self, command: list[str]) -> None:
        # A fresh interpreter finds modules where this one does.
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self.output: IO[bytes] = self._process.stdout
        self._received = b""
        self.is_ready = False
        self.place: int | None = None
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def is_waited_for(self) -> bool:
        return not self.is_ready or self.place is not None

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, place: int, item: Item, *, deadline: float) -> None:
        self.place, self.deadline = place, deadline
        with contextlib.suppress(BrokenPipeError):  # it has died; reading its output says so
            self._input.write(json.dumps(item).encode() + b"\n")
            self._input.flush()

    def take(self, chunk: bytes) -> Any:
        """What it said, or None while a part of it is missing."""
        self._received += chunk
        if not self._received.endswith(b"\n"):
            return None
        line, self._received = self._received, b""
        return json.loads(line)

    def describe_end(self) -> str:
        return f"exit status {self._process.wait()}"

    def stop(self) -> None:
        """End it in peace: its input ends."""
        with contextlib.suppress(BrokenPipeError):  # it has died with something unread
            self._input.close()
        if self.place is not None or not self.is_ready:
            self._process.kill()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.output.close()

    def kill(self) -> None:
        self._process.kill()
        self.stop()

"""The link between ranks that only train and ranks that only generate.

Each side has a default process group of its own, so that Megatron, vLLM and every collective of
this package see a world that consists of their side. The link is one more group, of all ranks:
the trainers first, then the engines. torch has no record of it, because the same rank of two
default groups would be ambiguous; it is used through this class alone.

Three kinds of messages share the group. `Orders` are small and go from the trainers to the engines,
in order. `Values` have any size and go either way. `WeightMessages` are exchanged by all ranks at
once, on an order of their own.
"""

import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, Protocol, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.runtime.failures import OtherRankError, RankTimeoutError
from megatron_rl.runtime.idle import IdleTime
from megatron_rl.runtime.interruption import RunInterrupted
from megatron_rl.runtime.watchdog import Heartbeat

WEIGHTS, VALUES = 0, 1  # tags of messages
_REPORT_INTERVAL = 1.0  # seconds between two reports of progress
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25  # seconds between two polls of the store
_END_SECONDS = 60.0  # that rank 0 waits for the others at the end
_OVER = "over"  # key: the trainers have ended
_FAILED = "failed"  # key of the first error of any rank


class LinkRank(Protocol):
    """A rank of a link, as its messages use it."""

    rank: int
    trainers: int
    engines: int
    store: Any

    @property
    def is_engine(self) -> bool:
        """True on a rank that only generates."""
        ...

    def wait_for(self, key: str) -> bytes:
        """Return the value of a key of the store as soon as it exists."""
        ...


@dataclass
class Orders:
    """Orders of the trainers to the engines, in order, through the store."""

    link: LinkRank
    _count: int = 0

    def send(self, kind: str, *arguments: Any) -> None:
        """Send the engines an order; called by every trainer, sent by the first."""
        assert not self.link.is_engine
        if self.link.rank == 0:
            self.link.store.set(f"order {self._count}", pickle.dumps((kind, *arguments)))
        self._count += 1

    def next(self) -> tuple[Any, ...]:
        """Wait for the next order of the trainers; the same on every engine rank."""
        assert self.link.is_engine
        order: tuple[Any, ...] = pickle.loads(self.link.wait_for(f"order {self._count}"))
        self._count += 1
        return order


@dataclass
class Values:
    """Values of any size between the first ranks of both sides. host: torch's gloo group."""

    link: LinkRank
    host: Any
    _sent: int = 0
    _taken: int = 0
    _sending: list[tuple[Tensor, Any]] = field(default_factory=list)

    @property
    def _ends(self) -> tuple[int, int]:
        """The first rank of this side, and of the other."""
        return (self.link.trainers, 0) if self.link.is_engine else (0, self.link.trainers)

    def send(self, value: Any) -> None:
        """Send the other side a value, without waiting; called by every rank of this side."""
        first, other = self._ends
        if self.link.rank == first:
            data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            # Announced first: the first message between two ranks waits for both.
            name = _value_key(self._sent, is_engine=self.link.is_engine)
            self.link.store.set(name, str(len(data)))
            self._sending.append((data, self.host.send([data], other, VALUES)))
        self._sent += 1

    def take(self) -> Any:
        """Wait for the other side's next value; returns it on this side's first rank, else None."""
        first, other = self._ends
        name = _value_key(self._taken, is_engine=not self.link.is_engine)
        size = int(self.link.wait_for(name))
        self._taken += 1
        if self.link.rank != first:
            return None
        data = torch.empty(size, dtype=torch.uint8)
        self.host.recv([data], other, VALUES).wait()
        return pickle.loads(data.numpy().data)

    def flush(self) -> None:
        """Release the memory of sent values, which the other side must have taken."""
        for _, work in self._sending:
            work.wait()
        self._sending.clear()


@dataclass
class WeightMessages:
    """Collectives and messages of a weight sync, between all ranks of both sides.

    host, device: torch's gloo group, and its NCCL group where there is CUDA.
    """

    link: LinkRank
    host: Any
    device: Any
    _gathers: int = 0

    def all_reduce(self, total: Tensor) -> Any:
        """Start summing a tensor on the host over all ranks; returns the work to wait for."""
        return self.host.allreduce([total])

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order; for small values. Collective."""
        self._gathers += 1
        name, store = f"gather {self._gathers}", self.link.store
        store.set(f"{name}/{self.link.rank}", pickle.dumps(value))
        ranks = range(self.link.trainers + self.link.engines)
        return [pickle.loads(store.get(f"{name}/{rank}")) for rank in ranks]

    def start(
        self, *, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> list[Any]:
        """Start messages to and from ranks, in the order of both; returns the work to wait for."""
        on_device = any(tensor.is_cuda for tensor, _ in (*sends, *receives))
        group = self.device if on_device else self.host
        if on_device:  # NCCL starts the messages of a group at once
            group._start_coalescing(torch.device("cuda"))
        work = [group.send([tensor], to, WEIGHTS) for tensor, to in sends]
        work += [group.recv([tensor], sender, WEIGHTS) for tensor, sender in receives]
        return [group._end_coalescing(torch.device("cuda"))] if on_device else work


@dataclass
class Link:
    """Group of all ranks of both sides, as one of them.

    rank: of all ranks, of which the first `trainers` train and the last `engines` generate.
    store: torch's Store, reached by all ranks. patience: seconds to wait for the other side while
    it makes no progress. heartbeat: of this rank; waiting counts as progress.
    """

    rank: int
    trainers: int
    engines: int
    store: Any
    timeout: timedelta
    patience: float = float("inf")
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    _reported: float = 0.0  # when this rank last reported its progress
    _is_waiting: bool = False
    _asked: float = 0.0  # when this rank last asked for the end
    _is_over: bool = False

    def __post_init__(self) -> None:
        size = self.trainers + self.engines
        with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="1"):  # few pairs exchange anything
            host = dist.ProcessGroupGloo(
                dist.PrefixStore("link host", self.store), self.rank, size, self.timeout
            )
        device: Any = None
        if torch.cuda.is_available():
            store = dist.PrefixStore("link device", self.store)
            options = dist.ProcessGroupNCCL.Options()
            device = dist.ProcessGroupNCCL(store, self.rank, size, options)
        self.orders, self.values = Orders(self), Values(self, host)
        self.weights = WeightMessages(self, host, device)

    @property
    def is_engine(self) -> bool:
        """True on a rank that only generates."""
        return self.rank >= self.trainers

    def watch(self, heartbeat: Heartbeat) -> None:
        """Use this rank's heartbeat, whose progress the other side sees from now on."""
        self.heartbeat, heartbeat.also = heartbeat, self.advance

    def advance(self) -> None:
        """Report that this rank makes progress, at most once per second."""
        now = time.monotonic()
        if self._is_waiting or now - self._reported < _REPORT_INTERVAL:
            return
        self._reported = now
        self.store.add(_progress_key(is_engine=self.is_engine), 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *trace: object
    ) -> None:
        """End the other side as this one ends; rank 0, which has the store, leaves last."""
        if error is not None and not isinstance(error, RunInterrupted):
            self.fail(error)
            return
        try:
            if not self.is_engine:
                self.store.set(_OVER, "")
                self.orders.send("end" if error is None else "interrupted")
            self.store.add("left", 1)
            end = time.monotonic() + _END_SECONDS
            everyone = self.trainers + self.engines
            while not self.rank and self.store.add("left", 0) < everyone and time.monotonic() < end:
                time.sleep(_LONGEST_PAUSE)
        except RuntimeError:  # rank 0 has waited in vain and is gone
            return

    def fail(self, error: BaseException) -> None:
        """Report an error of this rank, so that the other side raises too; the first one stays."""
        text = f"rank {self.rank}: {type(error).__name__}: {error}"
        try:
            self.store.compare_set(_FAILED, "", text)
        except RuntimeError:  # rank 0 is gone, and the store with it
            return

    def is_over(self) -> bool:
        """True if the trainers have ended or a rank has failed; asks at most once per second."""
        now = time.monotonic()
        if now - self._asked >= _REPORT_INTERVAL:
            self._asked = now
            self._is_over = self.store.check([_OVER]) or self.store.check([_FAILED])
        return self._is_over

    def wait_for(self, key: str) -> bytes:
        """Return the value of a key of the store as soon as it exists."""
        # If rank 0 does not respond, the store does not either: nothing is counted then.
        with self.heartbeat.patient(self.patience):
            return self._poll(key)

    def _poll(self, key: str) -> bytes:
        self._is_waiting = True
        idle, progress, pause = IdleTime(self.patience), -1, _SHORTEST_PAUSE
        try:
            while not self.store.check([key]):
                if self.store.check([_FAILED]):
                    raise OtherRankError(self.store.get(_FAILED).decode())
                self.heartbeat.count()
                now = self.store.add(_progress_key(is_engine=not self.is_engine), 0)
                if now != progress:
                    progress = now
                    idle.restart()
                elif idle.is_over():
                    self._raise_late(key)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            return self.store.get(key)
        except (RankTimeoutError, OtherRankError):
            raise
        except RuntimeError as error:  # includes torch's DistNetworkError and DistStoreError
            raise RankTimeoutError(
                f"rank {self.rank} waits for {key}, but rank 0 does not respond: {error}"
            ) from error
        finally:
            self._is_waiting = False

    def _raise_late(self, key: str) -> NoReturn:
        first, last = self.trainers, self.trainers + self.engines - 1
        others = f"ranks 0 to {first - 1}, which train," if self.is_engine else ""
        others = others or f"ranks {first} to {last}, which generate,"
        raise RankTimeoutError(
            f"rank {self.rank} waits for {key}: {others} made no progress for {self.patience:g} s"
        )


def _value_key(number: int, *, is_engine: bool) -> str:
    return f"{'result' if is_engine else 'value'} {number}"


def _progress_key(*, is_engine: bool) -> str:
    return "progress of engines" if is_engine else "progress of trainers"

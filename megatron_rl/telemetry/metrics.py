"""Metrics of a step and of the start: seconds, peak memory, and the writer of metrics.jsonl."""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from megatron_rl.config import Config
from megatron_rl.distributed.collectives import Group, reduce_max
from megatron_rl.runtime.watchdog import Heartbeat
from megatron_rl.telemetry.loggers import CLOSE_SECONDS, LoggerThread, build_loggers


class PeakMemory:
    """Peak bytes since the last `reset`: allocated on a CUDA device, else resident on the host.

    Includes both the actor and the engine, which share the process. Without CUDA it requires Linux
    with a writable /proc/self/clear_refs; otherwise the peak is nan.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._can_reset = True
        self._earlier_peak, self._released = 0.0, 0

    def reset(self) -> None:
        """Reset the peak to the memory in use now."""
        self._earlier_peak = 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        except OSError:
            self._can_reset = False

    def count_without(self, released: int) -> None:
        """Subtract from now on the bytes of a sleeping engine, which torch still counts."""
        peak = self.peak()
        self.reset()
        self._earlier_peak, self._released = peak, released

    def now(self) -> int:
        """Return the bytes in use now."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) - self._released
        return _resident("VmRSS")

    def peak(self) -> float:
        """Return the peak bytes in use since the last `reset`."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - self._released
            return max(self._earlier_peak, float(peak))
        return float(_resident("VmHWM")) if self._can_reset else math.nan


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


# Of each version of control groups: where they are, limit and use of memory, and what of the use
# is files that the kernel drops when memory is short.
_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}  # fmt: skip


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still use: the host's, or fewer in a control group.

    Containers and SLURM jobs have limits of their own. root: of the file system.
    """
    free = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            for name in _GROUPS.keys() & set(controllers.split(",")):
                top = root / _GROUPS[name][0]
                place = top / path.lstrip("/")
                # In a container the path may be the host's; then only the top is there.
                groups = [one for one in (place, *place.parents) if one.is_relative_to(top)]
                free += [left for one in groups if (left := _left_in_group(one, name)) is not None]
    return min(free)


def _left_in_group(group: Path, version: str) -> int | None:
    """Return the bytes left in a control group; None without a limit."""
    _, *names, cached = _GROUPS[version]
    try:
        limit, used = ((group / name).read_text(encoding="utf-8").strip() for name in names)
        rows = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    files = next((int(row.split()[1]) for row in rows if row.startswith(f"{cached} ")), 0)
    return None if limit == "max" else int(limit) - int(used) + files


HOST_FREE = "memory/host_free_gib"
_TREND_STEPS = 50  # of the line through the free memory of the host
_WARNED_STEPS = 200  # before that line reaches 0


class HostMemoryTrend:
    """Warns before the host's memory ends, by a line through what was free after the last steps."""

    def __init__(self, *, steps: int) -> None:
        self._last, self._warned = steps, math.inf
        self._free: deque[tuple[int, float]] = deque(maxlen=_TREND_STEPS)

    def warning(self, step: int, free: float) -> str | None:
        """Return a warning if memory ends within 200 steps and this run; again at each half.

        free: GiB after `step`.
        """
        self._free.append((step, free))
        if len(self._free) < _TREND_STEPS:
            return None
        slope = np.polyfit([one[0] for one in self._free], [one[1] for one in self._free], 1)[0]
        left = -free / slope if slope < 0 else math.inf
        if left > min(_WARNED_STEPS, self._last - step, self._warned / 2):
            return None
        self._warned = left
        return (
            f"warning: the memory of a host ends in about {left:.0f} steps: {free:.1f} GiB are "
            f"free, and {-1024 * slope:.1f} MiB less after each of the last {_TREND_STEPS} steps; "
            "a stop and a resume with the same command free what the run's own processes leak "
            "(memory/host_gib is the largest of them)"
        )


_SLOW_FACTOR = 3.0  # of the others' median
_SLOW_STEPS = 3  # in succession, of the same ranks: one long response is no slow rank
_SLOW_SECONDS = 1.0  # more than the others, or it does not matter


class SlowRanks:
    """Names ranks that are much slower than other ranks in several steps in succession.

    doing: what their seconds are of, as in "needed 20 s to generate".
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._slowest, self._count = -1, 0

    def warning(self, by_ranks: Mapping[tuple[int, ...], float]) -> str | None:
        """Return a warning in the third such step, and each time the number of them doubles.

        by_ranks: seconds in this step of those ranks together; without any, nothing changes.
        """
        seconds = list(by_ranks.values())
        if len(seconds) < 2 or not any(seconds):
            return None
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        own = seconds[slowest]
        others = float(np.median([*seconds[:slowest], *seconds[slowest + 1 :]]))
        is_slow = own > max(_SLOW_FACTOR * others, others + _SLOW_SECONDS)
        is_same = slowest == self._slowest
        self._slowest = slowest if is_slow else -1
        self._count = is_slow * (self._count * is_same + 1)
        steps, rest = divmod(self._count, _SLOW_STEPS)
        if not steps or rest or steps & (steps - 1):
            return None
        ranks = list(by_ranks)[slowest]
        is_range = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
        names = f"{ranks[0]} to {ranks[-1]}" if is_range else ", ".join(map(str, ranks))
        return (
            f"warning: rank{'s' * (len(ranks) > 1)} {names} needed {own:.1f} s to {self._doing}, "
            f"the others {others:.1f} s (median), for {self._count} steps in succession, and all "
            "wait: look at what else runs on its node, and at the clocks and temperature of its "
            "GPU; without a cause, leave out the node and resume"
        )


class PhaseInterval(NamedTuple):
    """Time without a break that a rank spent in a phase."""

    phase: str
    start: float  # seconds since the epoch, by the clock of the rank's node
    seconds: float


class PhaseClock:
    """Seconds and peak memory of each named phase of the current step.

    A step ends when `metrics` is called. All later time, including the rest of an open phase, is
    charged to the next step, so that the rows of all steps add up to the total time.
    progress: notified of the start of each phase.

    of_engines: intervals of engines on ranks of their own, which the first trainer has received.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        group: Group = None,
        progress: Heartbeat | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.group = group  # of all ranks
        self._progress = progress or Heartbeat()
        self.memory = PeakMemory(device)
        self._open: str | None = None
        self._epoch = time.time() - time.perf_counter()
        self._intervals: list[PhaseInterval] = []
        self.of_engines: list[PhaseInterval] = []
        self.reset()

    def reset(self) -> None:
        """Clear all phases and start a step."""
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, float] = {}  # bytes
        self._start = self._charged = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time and the peak memory of the enclosed block to `name`."""
        assert self._open is None, f"{name} begins within {self._open}"
        self._open, self._charged = name, time.perf_counter()
        self._progress.begin(name)
        self.memory.reset()
        try:
            yield
            self._charge(name)
        finally:
            self._open = None

    def _charge(self, name: str) -> None:
        if self.device.type == "cuda":  # queued work is charged to its own phase
            torch.cuda.synchronize(self.device)
        self.peaks[name] = max(self.peaks.get(name, 0.0), self.memory.peak())
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._charged
        self._intervals.append(
            PhaseInterval(name, self._epoch + self._charged, now - self._charged)
        )
        self._charged = now

    def metrics(self) -> dict[str, float]:
        """Return `time/<phase>`, `time/step` and metrics of memory, and start a new step.

        Memory is the maximum over ranks; what is free of the host's, the minimum over nodes.
        Collective: every rank must have run the same phases.
        """
        if self._open is None:
            self._charged = time.perf_counter()
        else:
            self._charge(self._open)
        seconds, peaks = self.seconds, self.peaks
        times = {f"time/{name}": value for name, value in seconds.items()}
        times["time/step"] = self._charged - self._start
        self._ended = self._epoch + self._start, times["time/step"]
        self.seconds, self.peaks, self._start = {}, {}, self._charged
        free = free_memory()
        local = torch.tensor([*peaks.values(), _resident("VmRSS"), -free], dtype=torch.float64)
        largest = reduce_max(local, group=self.group).tolist()
        memory = {
            f"memory/{name}_peak_gib": peak / 2**30
            for name, peak in zip(peaks, largest[:-2], strict=True)
        }
        host = {"memory/host_gib": largest[-2] / 2**30, HOST_FREE: -largest[-1] / 2**30}
        return times | memory | host

    def pop_intervals(self) -> list[PhaseInterval]:
        """Return what this rank did since the last call."""
        intervals, self._intervals = self._intervals, []
        return intervals

    def pop_timeline(self, *, has_engine_ranks: bool) -> dict[str, Any]:
        """Return the line of timeline.jsonl for the step that `metrics` has ended.

        `start`: seconds since the epoch. `ranks`: for each group of ranks the intervals
        [phase, start, seconds] of its first rank, from the start of the step. Those of engines on
        ranks of their own have arrived during this step, and may lie in earlier ones.
        """
        start, seconds = self._ended
        own, of_engines, self.of_engines = self.pop_intervals(), self.of_engines, []
        groups = {"all ranks": own}
        if has_engine_ranks:
            groups = {"trainers": own, "engines": of_engines}
        ranks = {
            name: [[one.phase, round(one.start - start, 4), round(one.seconds, 4)] for one in group]
            for name, group in groups.items()
        }
        return {"start": round(start, 4), "seconds": round(seconds, 4), "ranks": ranks}


class MetricLog:
    """Appends one JSON object per step to metrics.jsonl and passes it to the configured loggers.

    On resume `RunDirectory.rewind` first drops the rows after the checkpoint, so that the file is
    identical to that of an uninterrupted run. echo: receives warnings about loggers.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        echo: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.file = folder / "metrics.jsonl"
        self._loggers = [
            LoggerThread(name, build, metrics=self.file, echo=echo)
            for name, build in build_loggers(folder, config).items()
        ]

    def open(self, *, first_step: int) -> None:
        """Start the loggers; rows from `first_step` on replace older rows."""
        for logger in self._loggers:
            logger.open(first_step=first_step)

    def append(self, row: Mapping[str, float], *, sample: Mapping[str, Any] | None = None) -> None:
        """Write one step's row; values that are not finite become null.

        sample: a rollout of the step (`runs.rollouts.Row`), shown by the loggers as text.
        """
        clean = {key: _finite(value) for key, value in row.items()}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")
        for logger in self._loggers:
            logger.append(clean, sample)

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Flush and close the loggers; wait for each of them for at most so many seconds."""
        for logger in self._loggers:
            logger.close(seconds=seconds)


def _finite(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else None


class StartUp:
    """Seconds of each part of the start-up, recorded when the part ends.

    The first part, from the start of the command until this object is created, is `imports`.
    since: when the command was started, in seconds since the epoch; None: with this process.
    """

    def __init__(self, since: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._last = psutil.Process().create_time() if since is None else since
        self.ended("imports")

    def ended(self, part: str) -> None:
        """Record that `part` ended now; it started when the previous part ended."""
        now = time.time()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """Return `time/start_<part>`, in seconds."""
        return {f"time/start_{part}": seconds for part, seconds in self.seconds.items()}

    def __str__(self) -> str:
        parts = ", ".join(
            f"{part.replace('_', ' ')} {seconds:.1f}" for part, seconds in self.seconds.items()
        )
        return f"start-up took {sum(self.seconds.values()):.1f} s: {parts}"


MAX_QUEUED = 8  # jobs; each may keep a step's rollouts in memory


class BackgroundWriter:
    """Runs jobs one after the other in a thread.

    After the first error no further job runs, and every later call raises that error. The
    interpreter waits for running jobs before it exits.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer")
        self._waiting: deque[Future[None]] = deque()
        self._error: Exception | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Queue `job`; blocks only while the queue is full."""
        self._collect(leave=MAX_QUEUED - 1)
        self._waiting.append(self._thread.submit(self._run, job))

    def wait(self) -> None:
        """Return when every job is done."""
        self._collect(leave=0)

    def _run(self, job: Callable[[], object]) -> None:
        if self._error is not None:
            return  # a metrics row must not be written if its rollouts failed to be
        try:
            job()
        except Exception as error:  # noqa: BLE001 - raised by the caller's next call
            self._error = error

    def _collect(self, *, leave: int) -> None:
        while self._waiting and (len(self._waiting) > leave or self._waiting[0].done()):
            self._waiting.popleft().result()
        if self._error is not None:
            raise self._error

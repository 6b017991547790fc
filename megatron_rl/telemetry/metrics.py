"""Metrics of a step: phase timing, and the writer of metrics.jsonl."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import Config
from megatron_rl.distributed.collectives import Group, reduce_max
from megatron_rl.runtime.heartbeat import Heartbeat
from megatron_rl.telemetry.logger_thread import CLOSE_SECONDS, LoggerThread
from megatron_rl.telemetry.loggers import build_loggers
from megatron_rl.telemetry.peak_memory import PeakMemory


class PhaseClock:
    """Seconds and peak memory of each named phase of the current step.

    A step ends when `metrics` is called. All later time, including the rest of an open phase, is
    charged to the next step, so that the rows of all steps add up to the total time.
    progress: notified of the start of each phase.
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
        self._charged = now

    def metrics(self) -> dict[str, float]:
        """Return `time/<phase>`, `time/step` and `memory/<phase>_peak_gib`, and start a new step.

        Memory is the maximum over ranks. Collective: every rank must have run the same phases.
        """
        if self._open is None:
            self._charged = time.perf_counter()
        else:
            self._charge(self._open)
        seconds, peaks = self.seconds, self.peaks
        times = {f"time/{name}": value for name, value in seconds.items()}
        times["time/step"] = self._charged - self._start
        self.seconds, self.peaks, self._start = {}, {}, self._charged
        local = torch.tensor([*peaks.values()], dtype=torch.float64)
        largest = reduce_max(local, group=self.group)
        memory = {
            f"memory/{name}_peak_gib": peak / 2**30
            for name, peak in zip(peaks, largest.tolist(), strict=True)
        }
        return times | memory


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
        """Start the loggers; rows from `first_step` on replace older ones."""
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

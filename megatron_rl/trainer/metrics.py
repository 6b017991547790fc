"""Where a step's numbers go: metrics.jsonl, TensorBoard and, if configured, W&B."""

import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import LoggingSection
from megatron_rl.distributed.collectives import Group, reduce_max
from megatron_rl.peak_memory import PeakMemory
from megatron_rl.watching.board import Progress

# What TensorBoard shows first, in a group of its own, beside `eval/<set>/avg@<k>`.
OVERVIEW = (
    "reward/mean", "policy/entropy", "response/length_mean", "response/truncated_fraction",
    "advantage/zero_groups_fraction", "gate/acceptance", "ratio/prefix_mean_log_std", "grad/norm",
    "rollout/logprob_gap_mean", "rollout/tokens_per_second", "time/step",
)  # fmt: skip


def tensorboard_tag(key: str) -> str:
    """A metric's name in TensorBoard, which sorts groups by what stands before the first slash."""
    is_score = key.startswith("eval/") and "/avg@" in key
    return f"0_overview/{key.replace('/', '_')}" if is_score or key in OVERVIEW else key


class PhaseClock:
    """Seconds and peak memory of each named phase of the current step.

    A step ends where `metrics` is asked for: what follows, the rest of an open phase too, belongs
    to the next one, so that no second is lost between two rows.
    progress: is told of each phase that begins.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        group: Group = None,
        progress: Progress | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.group = group  # of all ranks
        self._progress = progress or Progress()
        self.memory = PeakMemory(device)
        self._open: str | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all phases; the step begins now."""
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
        """`time/<phase>`, `time/step`; `memory/<phase>_peak_gib` of the rank that needed most.

        The next step begins. Collective: every rank has walked the same phases.
        """
        if self._open is None:
            self._charged = time.perf_counter()
        else:
            self._charge(self._open)
        seconds, peaks = self.seconds, self.peaks
        times = {f"time/{name}": value for name, value in seconds.items()}
        times["time/step"] = self._charged - self._start
        self.seconds, self.peaks, self._start = {}, {}, self._charged
        most = reduce_max(torch.tensor([*peaks.values()], dtype=torch.float64), group=self.group)
        memory = {
            f"memory/{name}_peak_gib": peak / 2**30
            for name, peak in zip(peaks, most.tolist(), strict=True)
        }
        return times | memory


class MetricLog:
    """Appends one JSON object per step to metrics.jsonl and mirrors it to the configured loggers.

    After a resume `RunDirectory.rewind` first drops the rows past the checkpoint, so that the file
    reads as if the run had never stopped.
    """

    def __init__(self, folder: Path, settings: LoggingSection, *, config: dict[str, Any]) -> None:
        self.file = folder / "metrics.jsonl"
        self._settings = settings
        self._folder = folder
        self._config = config
        self._tensorboard: Any = None
        self._wandb: Any = None

    def open(self, *, first_step: int) -> None:
        """Start the loggers; rows from `first_step` on replace older ones."""
        if self._settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(
                str(self._folder / "tensorboard"), purge_step=first_step or None
            )
        if self._settings.wandb is not None:
            import wandb

            self._wandb = wandb.init(
                project=self._settings.wandb.project,
                entity=self._settings.wandb.entity,
                name=self._folder.name,
                id=self._wandb_id(),
                resume="allow",
                dir=str(self._folder),
                config=self._config,
            )
            # W&B drops rows of steps that it has seen, as those after a rewind: to it a step is a
            # number like any other, by which all are drawn.
            self._wandb.define_metric("step")
            self._wandb.define_metric("*", step_metric="step")

    def append(self, row: Mapping[str, float]) -> None:
        """Write one step's row; a value that is not finite becomes null."""
        clean = {key: _finite(value) for key, value in row.items()}
        with self.file.open("a") as file:
            file.write(json.dumps(clean) + "\n")
        step = int(row["step"])
        numbers = {k: v for k, v in clean.items() if v is not None and k != "step"}
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(tensorboard_tag(key), value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(numbers | {"step": step})

    def _wandb_id(self) -> str:
        """The run's own, kept in its folder: names of folders come again, in other projects too."""
        file = self._folder / "wandb_id"
        if not file.is_file():
            file.write_text(secrets.token_hex(6))
        return file.read_text()

    def close(self) -> None:
        """Flush and close the loggers."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _finite(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else None

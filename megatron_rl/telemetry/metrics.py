"""Metrics of a step: phase timing, and the writers to metrics.jsonl, TensorBoard and W&B."""

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
from megatron_rl.runs.rollouts import describe_rollout, printable, shorten
from megatron_rl.runtime.heartbeat import Heartbeat
from megatron_rl.telemetry.peak_memory import PeakMemory

# Metrics that TensorBoard shows first, in one group together with `eval/<set>/avg@<k>`.
OVERVIEW = (
    "reward/mean", "policy/entropy", "response/length_mean", "response/truncated_fraction",
    "advantage/zero_groups_fraction", "gate/acceptance", "ratio/prefix_mean_log_std", "grad/norm",
    "mismatch/logprob_abs_diff_mean", "rollout/tokens_per_second", "time/step",
)  # fmt: skip

LOGGED_CHARACTERS = 10_000  # maximum length of a prompt or response in TensorBoard and W&B


def tensorboard_tag(key: str) -> str:
    """Return a metric's tag in TensorBoard, which groups by the text before the first slash."""
    is_score = key.startswith("eval/") and "/avg@" in key
    return f"0_overview/{key.replace('/', '_')}" if is_score or key in OVERVIEW else key


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
    """Appends one JSON object per step to metrics.jsonl and mirrors it to the configured loggers.

    On resume `RunDirectory.rewind` first drops the rows after the checkpoint, so that the file is
    identical to that of an uninterrupted run.
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
            # W&B drops rows of its own steps that were logged before, which happens after a
            # rewind: log our step as an ordinary metric and use it as the x-axis.
            self._wandb.define_metric("step")
            self._wandb.define_metric("*", step_metric="step")

    def append(self, row: Mapping[str, float], *, sample: Mapping[str, Any] | None = None) -> None:
        """Write one step's row; values that are not finite become null.

        sample: a rollout of the step (`runs.rollouts.Row`), shown by the loggers as text.
        """
        clean = {key: _finite(value) for key, value in row.items()}
        with self.file.open("a") as file:
            file.write(json.dumps(clean) + "\n")
        step = int(row["step"])
        numbers = {k: v for k, v in clean.items() if v is not None and k != "step"}
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(tensorboard_tag(key), value, step)
            if sample is not None:
                text = describe_rollout(sample, most=LOGGED_CHARACTERS, indent=4 * " ")  # verbatim
                self._tensorboard.add_text("sample", text, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(numbers | {"step": step} | self._wandb_table(step, sample))

    def _wandb_table(self, step: int, sample: Mapping[str, Any] | None) -> dict[str, Any]:
        if sample is None:
            return {}
        import wandb

        row = {"step": step} | {
            name: shorten(printable(value), LOGGED_CHARACTERS) if isinstance(value, str) else value
            for name, value in sample.items()
        }
        return {"sample": wandb.Table(columns=list(row), data=[list(row.values())])}

    def _wandb_id(self) -> str:
        """Return the run's W&B id, stored in its folder, because folder names are not unique."""
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

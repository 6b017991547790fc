"""Loggers in addition to metrics.jsonl: TensorBoard, Weights & Biases, MLflow and trackio."""

import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config import Config
from megatron_rl.config.logging_sections import MlflowSection, TrackioSection, WandbSection
from megatron_rl.runs.directory import flatten
from megatron_rl.runs.rollouts import describe_rollout, printable, shorten

# Metrics that TensorBoard shows first, in one group together with `eval/<set>/avg@<k>`.
OVERVIEW = (
    "reward/mean", "policy/entropy", "response/length_mean", "response/truncated_fraction",
    "advantage/zero_groups_fraction", "gate/acceptance", "ratio/prefix_mean_log_std", "grad/norm",
    "mismatch/logprob_abs_diff_mean", "rollout/tokens_per_second", "time/step",
)  # fmt: skip

LOGGED_CHARACTERS = 10_000  # maximum length of a prompt or response in TensorBoard and W&B
_CALL_PARAMS, _CALL_METRICS = 100, 1000  # limits of one call of MLflow
_MLFLOW_NAME = re.compile(r"[^\w./: -]")  # characters that MLflow rejects in the name of a metric

Sample = Mapping[str, Any] | None  # a rollout (`runs.rollouts.Row`), shown as text
Numbers = dict[str, float]  # the finite metrics of a step


class Logger(Protocol):
    """The interface of a logger; its methods may raise anything and take as long as they like."""

    def start(self, first_step: int) -> None:
        """Begin, or continue the run; rows from `first_step` on replace older ones."""

    def log(self, step: int, numbers: Numbers, sample: Sample) -> None:
        """Send the metrics of one step."""

    def close(self) -> None:
        """Send everything and end."""


def build_loggers(folder: Path, config: Config) -> dict[str, Callable[[], Logger]]:
    """Return the constructors of the configured loggers; each imports its library."""
    settings, values = config.logging, config.model_dump()
    loggers: dict[str, Callable[[], Logger]] = {}
    if settings.tensorboard:
        loggers["TensorBoard"] = lambda: TensorBoardLogger(folder)
    if (wandb := settings.wandb) is not None:
        loggers["W&B"] = lambda: WandbLogger(folder, wandb, values)
    if (mlflow := settings.mlflow) is not None:
        loggers["MLflow"] = lambda: MlflowLogger(folder, mlflow, values)
    if (trackio := settings.trackio) is not None:
        loggers["trackio"] = lambda: TrackioLogger(folder, trackio, values)
    return loggers


class TensorBoardLogger:
    """Event files in the run directory."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _hide_reraised(threading.excepthook)
        self._folder, self._class = folder, SummaryWriter
        self._writer: Any = None

    def start(self, first_step: int) -> None:
        """Create a new event file."""
        folder = str(self._folder / "tensorboard")
        self._writer = self._class(folder, purge_step=first_step or None)

    def log(self, step: int, numbers: Numbers, sample: Sample) -> None:
        """Write scalars, and the sample as text."""
        for key, value in numbers.items():
            self._writer.add_scalar(tensorboard_tag(key), value, step)
        if sample is not None:
            text = describe_rollout(sample, most=LOGGED_CHARACTERS, indent=4 * " ")  # verbatim
            self._writer.add_text("sample", text, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _hide_reraised(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a hook for errors of threads without those of TensorBoard, which its calls raise."""

    def pass_on(arguments: Any) -> None:
        if type(arguments.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
            hook(arguments)

    return pass_on


def tensorboard_tag(key: str) -> str:
    """Return a metric's tag in TensorBoard, which groups by the text before the first slash."""
    is_score = key.startswith("eval/") and "/avg@" in key
    return f"0_overview/{key.replace('/', '_')}" if is_score or key in OVERVIEW else key


class WandbLogger:
    """A Weights & Biases run, the same for all starts of a run."""

    def __init__(self, folder: Path, settings: WandbSection, config: dict[str, Any]) -> None:
        import wandb

        self._wandb, self._folder, self._settings = wandb, folder, settings
        self._config, self._run = config, None

    def start(self, first_step: int) -> None:
        """Create or continue the W&B run."""
        run = self._run = self._wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            name=self._folder.name,
            id=_own_id(self._folder / "wandb_id"),
            resume="allow",
            dir=str(self._folder),
            config=self._config,
        )
        # W&B drops rows of its own steps that were logged before, which happens after a rewind:
        # log our step as an ordinary metric and use it as the x-axis.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Numbers, sample: Sample) -> None:
        """Send the metrics, and the sample as a table."""
        assert self._run is not None
        self._run.log(numbers | {"step": step} | self._table(step, sample))

    def _table(self, step: int, sample: Sample) -> dict[str, Any]:
        if sample is None:
            return {}
        row = {"step": step} | {
            name: shorten(printable(value), LOGGED_CHARACTERS) if isinstance(value, str) else value
            for name, value in sample.items()
        }
        return {"sample": self._wandb.Table(columns=list(row), data=[list(row.values())])}

    def close(self) -> None:
        """Upload the rest."""
        assert self._run is not None
        self._run.finish()


class MlflowLogger:
    """An MLflow run, the same for all starts of a run; config values are its parameters."""

    def __init__(self, folder: Path, settings: MlflowSection, config: dict[str, Any]) -> None:
        import mlflow

        self._mlflow, self._folder, self._settings = mlflow, folder, settings
        self._config, self._run_file = config, folder / "mlflow_run_id"

    def start(self, first_step: int) -> None:
        """Create or continue the MLflow run."""
        self._client = self._mlflow.MlflowClient(tracking_uri=self._settings.tracking_uri)
        if self._run_file.is_file():
            self._run_id = self._run_file.read_text(encoding="utf-8")
            self._client.update_run(self._run_id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(self._settings.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(
            self._settings.experiment
        )  # fmt: skip
        self._run_id = self._client.create_run(experiment, run_name=self._folder.name).info.run_id
        values = [self._mlflow.entities.Param(key, str(value)) for key, value in
                  flatten(self._config).items()]  # fmt: skip
        for start in range(0, len(values), _CALL_PARAMS):
            self._client.log_batch(self._run_id, params=values[start : start + _CALL_PARAMS])
        self._run_file.write_text(self._run_id, encoding="utf-8")

    def log(self, step: int, numbers: Numbers, sample: Sample) -> None:
        """Send the metrics; characters such as @, which MLflow rejects, become _."""
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        values = [metric(_MLFLOW_NAME.sub("_", key), value, now, step)
                  for key, value in numbers.items()]  # fmt: skip
        for start in range(0, len(values), _CALL_METRICS):
            self._client.log_batch(self._run_id, metrics=values[start : start + _CALL_METRICS])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


class TrackioLogger:
    """A trackio run, the same for all starts of a run."""

    def __init__(self, folder: Path, settings: TrackioSection, config: dict[str, Any]) -> None:
        import trackio

        self._trackio, self._folder, self._settings = trackio, folder, settings
        self._config, self._run = config, None

    def start(self, first_step: int) -> None:
        """Create or continue the run, which trackio finds by its name."""
        name = f"{self._folder.name}-{_own_id(self._folder / 'trackio_id')}"
        self._run = self._trackio.init(
            project=self._settings.project, name=name, resume="allow", config=self._config
        )

    def log(self, step: int, numbers: Numbers, sample: Sample) -> None:
        """Send the metrics."""
        assert self._run is not None
        self._run.log(numbers, step=step)

    def close(self) -> None:
        """Wait until everything is written."""
        assert self._run is not None
        self._run.finish()


def _own_id(file: Path) -> str:
    """Return the run's id in a logger, stored in its folder: names of folders are not unique."""
    if not file.is_file():
        file.write_text(secrets.token_hex(6), encoding="utf-8")
    return file.read_text(encoding="utf-8")

"""Loggers in addition to metrics.jsonl: TensorBoard, Weights & Biases, MLflow and trackio.

Each logger has a thread, so that a logger that raises or blocks never ends or delays a run. The
rows that a logger did not take are in metrics.jsonl, and are sent again when it works, at the end,
or by a resumed run.
"""

import contextlib
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config import Config
from megatron_rl.runs.directory import flatten
from megatron_rl.runs.files import iterate_rows_after
from megatron_rl.runs.rollouts import describe_rollout, printable, shorten
from megatron_rl.runtime.failures import is_full_disk

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
        """Begin, or continue the run; rows from `first_step` on replace older rows."""

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

    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        import wandb

        self._wandb, self._folder, self._project = wandb, folder, project
        self._config, self._run = config, None

    def start(self, first_step: int) -> None:
        """Create or continue the W&B run."""
        entity, _, project = self._project.rpartition("/")
        run = self._run = self._wandb.init(
            project=project,
            entity=entity or None,  # None: the default of the login
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

    def __init__(self, folder: Path, experiment: str, config: dict[str, Any]) -> None:
        import mlflow

        self._mlflow, self._folder, self._experiment = mlflow, folder, experiment
        self._config, self._run_file = config, folder / "mlflow_run_id"

    def start(self, first_step: int) -> None:
        """Create or continue the MLflow run."""
        self._client = self._mlflow.MlflowClient()
        if self._run_file.is_file():
            self._run_id = self._run_file.read_text(encoding="utf-8")
            self._client.update_run(self._run_id, status="RUNNING")
            return
        name = self._experiment
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
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

    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        import trackio

        self._trackio, self._folder, self._project = trackio, folder, project
        self._config, self._run = config, None

    def start(self, first_step: int) -> None:
        """Create or continue the run, which trackio finds by its name."""
        name = f"{self._folder.name}-{_own_id(self._folder / 'trackio_id')}"
        self._run = self._trackio.init(
            project=self._project, name=name, resume="allow", config=self._config
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


RETRY_SECONDS = 30.0  # between attempts of a logger that failed
BLOCKED_SECONDS = 120.0  # in one call of a logger, before a warning
CLOSE_SECONDS = 60.0  # to send what is left at the end of a run


class LoggerThread:
    """Sends rows to one logger in a thread, so that it can neither end nor delay a run.

    metrics: the run's metrics.jsonl. echo: receives a warning at the first failure, and a line when
    the missing rows are sent. The last step that was sent is stored while later ones are missing,
    so that a resumed run sends them.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], Logger],
        *,
        metrics: Path,
        echo: Callable[[str], object],
    ) -> None:
        self._name, self._metrics, self._echo = name, metrics, echo
        self._behind_file = metrics.with_name(f"{re.sub(r'[^a-z]', '', name.lower())}_is_behind")
        self._rows: queue.SimpleQueue[tuple[dict[str, Any], Sample] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._logger: Logger | None = None
        self._is_started = self._is_behind = self._has_warned = False
        self._sent = self._sent_from_file = -1  # the last such step
        self._call_began = self._retry_at = 0.0  # 0: no call in progress; try now
        try:  # here: imports in two threads at once can block each other
            self._logger = build()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library may raise anything
            self._warn(f"cannot be used ({_describe(error)}): training continues without it")

    def open(self, *, first_step: int) -> None:
        """Start the thread; rows from `first_step` on replace older rows."""
        self._sent = first_step - 1
        if first_step == 0:
            self._behind_file.unlink(missing_ok=True)
        elif self._behind_file.is_file():  # the last start of the run left rows out
            text = self._behind_file.read_text(encoding="utf-8")  # empty if the disk was full
            self._sent = min(int(text), self._sent) if text else -1
            self._is_behind = True
        if self._logger is not None:
            self._thread.start()
        else:  # a resumed run, in which it can be used, sends the rows
            self._mark_behind()

    def append(self, row: dict[str, Any], sample: Sample) -> None:
        """Queue a row that metrics.jsonl already contains; never blocks."""
        self._rows.put((row, sample))
        began = self._call_began
        if began and time.monotonic() - began > BLOCKED_SECONDS:
            self._warn(f"has not answered for {BLOCKED_SECONDS:.0f} s: training continues, and the "
                       "rows are sent when it answers")  # fmt: skip

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Send what is left and close the logger, for at most so many seconds."""
        if not self._thread.is_alive():
            return
        self._rows.put(None)
        self._thread.join(seconds)
        is_blocked = self._thread.is_alive()
        is_missing = is_blocked or self._is_behind
        steps = (row["step"] for row in (self._missing_rows() if is_missing else ()))
        if (first := next(steps, None)) is not None:
            if is_blocked:
                self._mark_behind()
            count = 1 + sum(1 for _ in steps)
            what = f"has not answered for {seconds:g} s" if is_blocked else "still fails"
            self._echo(
                f"warning: {self._name} {what}: {count} steps from {first} on are "
                f"missing there; {self._metrics.name} contains them, and a resumed run sends them"
            )

    def _serve(self) -> None:
        while (item := self._rows.get()) is not None:
            row, sample = item
            if row["step"] > self._sent_from_file and time.monotonic() >= self._retry_at:
                self._send(row, sample)
        if self._is_behind:
            self._send(None, None)
        with self._call():
            if self._is_started and self._logger is not None:
                self._logger.close()

    def _send(self, row: dict[str, Any] | None, sample: Sample) -> None:
        """Send a row, or all that are missing."""
        with self._call():
            assert self._logger is not None
            rows = self._missing_rows() if self._is_behind or row is None else iter([row])
            if not self._is_started:
                self._logger.start(self._sent + 1)
                self._is_started = True
            count = 0
            for one in rows:
                self._call_began = time.monotonic()
                step, is_given = int(one["step"]), row is not None and one["step"] == row["step"]
                numbers = {k: v for k, v in one.items() if v is not None and k != "step"}
                self._logger.log(step, numbers, sample if is_given else None)
                self._sent, count = step, count + 1
            if self._is_behind:
                self._is_behind, self._sent_from_file = False, self._sent
                self._behind_file.unlink(missing_ok=True)
                self._echo(f"{self._name} has received the {count} steps that were missing")

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Warn if the enclosed calls of the logger fail; the next attempt starts it again."""
        self._call_began = time.monotonic()
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library may raise anything
            self._is_started, self._retry_at = False, time.monotonic() + RETRY_SECONDS
            self._mark_behind()
            if not is_full_disk(error):  # which ends the run with a message of its own
                self._warn(f"failed ({_describe(error)}): training continues; the rows are in "
                           f"{self._metrics.name} and are sent when it works again")  # fmt: skip
        finally:
            self._call_began = 0.0

    def _mark_behind(self) -> None:
        self._is_behind = True
        with contextlib.suppress(OSError):  # the disk may be full
            self._behind_file.write_text(f"{self._sent}", encoding="utf-8")

    def _missing_rows(self) -> Iterator[dict[str, Any]]:
        return iterate_rows_after(self._metrics, self._sent)

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._echo(f"warning: {self._name} {text}")


def _describe(error: BaseException) -> str:
    """Return the type and the first line of an error, shortened."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__

"""Execution of the unfinished runs of a study, on this machine or on a cluster."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from megatron_rl.config import ConfigError, dump_config
from megatron_rl.runs.files import LOCK, read_metrics, try_lock
from megatron_rl.runtime.interruption import INTERRUPTED, end_with_parent
from research.study.state import read_state
from research.study.storing import note_start
from research.study.study_plan import PlannedRun, Study
from research.study.task_making import TaskMaker

POLL_SECONDS = 0.5
SAY_SECONDS = 60.0
RESTARTS = 3  # maximum restarts of a run that stopped early and can be resumed, as after a hang
FAILED_STARTS = 3  # runs in a row that fail without a step, as on a full disk; then none is started


class Started(Protocol):
    """Started run."""

    log_file: Path

    def status(self) -> int | None:
        """Return the exit status of the run; None while it is pending or running."""

    def end(self) -> bool:
        """Request a stop; returns True if the run stops and must be waited for."""


# Starts a run; returns None, to try again later, while a process of an earlier study uses it.
Start = Callable[[Study, PlannedRun], Started | None]


def start_here(study: Study, run: PlannedRun) -> "StartedHere | None":
    """Start a run on this machine, unless another process uses it."""
    file = run.folder / LOCK
    if file.exists():
        with file.open("a") as lock:
            if not try_lock(lock):
                return None
    return StartedHere(study, run)


class StartedHere:
    """Run in processes of this machine."""

    def __init__(self, study: Study, run: PlannedRun) -> None:
        note_start(study, run.name)
        self.log_file = study.folder / "logs" / f"{run.name}.log"
        command = [sys.executable, "-m", "megatron_rl.cli", "train", "--config"]
        with self.log_file.open("ab") as log:
            # In its own session, so that only the study forwards Ctrl-C to it.
            self._process = subprocess.Popen(
                [*command, str(config_file(study, run))],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - there is one thread
            )  # fmt: skip

    def status(self) -> int | None:
        return self._process.poll()

    def end(self) -> bool:
        self._process.terminate()  # the run saves its step
        return True


class StartedOnCluster:
    """Run launched on a cluster, which continues after this process exits."""

    def __init__(self, study: Study, run: PlannedRun, *, cluster_file: str) -> None:
        from megatron_rl.apps.launch.cluster import SlurmCluster, load_cluster
        from megatron_rl.apps.launch.following import find_record, has_record, is_active
        from megatron_rl.apps.launch.launch_plan import plan_launch
        from megatron_rl.apps.launch.starting import start_here, start_on_slurm

        cluster = load_cluster(cluster_file)
        start = start_on_slurm if isinstance(cluster, SlurmCluster) else start_here
        earlier = find_record(run.name) if has_record(run.name) else None
        if earlier and earlier.run == str(run.folder) and is_active(earlier):
            self._record = earlier  # launched by an earlier start of the study
        else:
            file = str(config_file(study, run))
            note_start(study, run.name, processor=f"of the cluster {Path(cluster_file).stem}")
            self._record = start(plan_launch(file, cluster, overrides=[], name=run.name))
        self.log_file = Path(self._record.folder) / "logs"
        self._next = 0.0

    def status(self) -> int | None:
        """Return the exit status; also None if it was polled less than POLL_SECONDS ago."""
        from megatron_rl.apps.launch.following import POLL_SECONDS, final_status, is_active

        if time.monotonic() < self._next:
            return None
        if not is_active(self._record):
            return final_status(self._record)
        self._next = time.monotonic() + POLL_SECONDS
        return None

    def end(self) -> bool:
        return False  # the job continues, and the next start of the study monitors it


@dataclass
class StudyProgress:
    """Counters of a study in progress, and an estimate of the remaining time."""

    study: Study
    echo: Callable[[str], None]
    done: int = 0
    failed: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    failed_starts: int = 0  # in a row
    restarts: Counter[str] = field(default_factory=Counter)
    begun: float = field(default_factory=time.monotonic)
    steps_before: dict[str, int] = field(default_factory=dict)  # steps of each run at the start
    steps_made: int = 0  # steps since then of runs that have finished

    def line(self, running: list[PlannedRun]) -> str:
        """Return runs done, the step of each active run, elapsed and remaining minutes."""
        parts = [f"{self.study.file.name}: {self.done} of {len(self.study.runs)} done"]
        if self.failed:
            parts.append(f"{len(self.failed)} failed")
        if self.unfinished:
            parts.append(f"{len(self.unfinished)} not finished")
        made = self.steps_made
        for run in running:
            step, steps = _last_step(run), run.config.trainer.steps
            made += step - self.steps_before[run.name]
            parts.append(f"{run.name} {step}/{steps}" + (" (exporting)" if step == steps else ""))
        minutes = (time.monotonic() - self.begun) / 60
        parts.append(f"{minutes:.0f} min")
        given_up = {*self.failed, *self.unfinished}
        requested = sum(
            run.config.trainer.steps - self.steps_before[run.name]
            for run in self.study.runs
            if run.name not in given_up
        )
        if made and requested > made:
            parts.append(f"about {(requested - made) * minutes / made:.0f} left")
        return ", ".join(parts)

    def note_end(self, run: PlannedRun, started: Started, status: int) -> bool:
        """Record the end of a run; returns True if it must be restarted."""
        has_started = status == 0 or _last_step(run) > self.steps_before[run.name]
        if self.failed_starts < FAILED_STARTS and status != INTERRUPTED:
            self.failed_starts = 0 if has_started else self.failed_starts + 1
        if status == INTERRUPTED and self.restarts[run.name] < RESTARTS:
            self.restarts[run.name] += 1
            self.echo(f"{run.name} ended early (status {status}): it is started again")
            return True
        if status == 0 and read_state(run).state == "done":
            self.done += 1
            self.steps_made += run.config.trainer.steps - self.steps_before[run.name]
        elif status == INTERRUPTED:
            self.unfinished.append(run.name)
            self.echo(f"{run.name} ended early {RESTARTS + 1} times: {started.log_file}")
        else:
            self.failed.append(run.name)
            self.echo(f"{run.name} failed with status {status}: {started.log_file}")
        return False

    def give_up(self, waiting: list[PlannedRun]) -> None:
        """Leave all runs that have not started, if the last ones made no step."""
        if waiting and self.failed_starts == FAILED_STARTS:
            self.unfinished += [run.name for run in waiting]
            waiting.clear()
            self.echo(
                f"{FAILED_STARTS} runs in a row failed before their first step, so no further one "
                "is started; correct the cause, and start the study again"
            )

    def end(self, *, is_interrupted: bool) -> int:
        """List the runs that are not done; returns the study's exit status."""
        self.echo(self.line([]))
        for name in self.failed:
            log = (
                self.study.folder / "logs" / f"{name}.log"
            )  # missing if its task could not be generated
            self.echo(f"  failed: {name}{f'; see {log}' if log.is_file() else ''}")
        if self.unfinished:
            names = ", ".join(self.unfinished)
            self.echo(f"  not finished: {names}; start the study again to continue")
        if self.failed and not is_interrupted:
            return 1
        return INTERRUPTED if is_interrupted or self.unfinished else 0


def _last_step(run: PlannedRun) -> int:
    rows = read_metrics(run.folder)
    return int(rows[-1]["step"]) if rows else 0


def config_file(study: Study, run: PlannedRun) -> Path:
    """Return the path of a run's config."""
    return study.folder / "configs" / f"{run.name}.yaml"


@contextmanager
def opened(study: Study) -> Iterator[None]:
    """Lock the study's folder and write the configs of its runs."""
    for folder in ("configs", "runs", "logs"):
        (study.folder / folder).mkdir(parents=True, exist_ok=True)
    with (study.folder / LOCK).open("a") as lock:
        if not try_lock(lock):
            raise ConfigError(
                f"{study.folder} is in use by another `python -m research.study`; wait until "
                "it has ended, or end it"
            )
        for run in study.runs:
            config_file(study, run).write_text(dump_config(run.config))
        yield


def run_study(
    study: Study,
    *,
    start: Start,
    echo: Callable[[str], None],
    on_end: Callable[[], object],
    python: str = sys.executable,
) -> int:
    """Run all unfinished runs; returns the exit status.

    The status is 0 if every run is done, and 75 if some can be resumed. A run that fails does not
    stop the others, but FAILED_STARTS in a row that make no step do; a run that stops early, as
    after a hang, is restarted at most RESTARTS times.
    On a signal, runs on this machine save their step and stop; jobs on a cluster continue.
    on_end: called after each run.
    """
    stop_requested = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, lambda number, frame: stop_requested.set())
    progress = StudyProgress(study, echo)
    waiting = []
    for run in study.runs:
        state = read_state(run)
        progress.steps_before[run.name] = state.step
        if state.state == "done":
            progress.done += 1
        else:
            waiting.append(run)
    tasks = TaskMaker(study, python, echo=echo, stop_requested=stop_requested)
    active: dict[str, tuple[PlannedRun, Started]] = {}
    output, is_passed_on = -math.inf, False
    while active or (waiting and not stop_requested.is_set()):
        progress.give_up(waiting)
        for run in list(waiting):
            if stop_requested.is_set() or len(active) >= study.file.side_by_side:
                break
            if not tasks.make(run):
                if not stop_requested.is_set():
                    waiting.remove(run)
                    progress.failed.append(run.name)
            elif (started := start(study, run)) is not None:
                waiting.remove(run)
                active[run.name] = run, started
        if time.monotonic() - output >= SAY_SECONDS:
            output = time.monotonic()
            echo(progress.line([run for run, _ in active.values()]))
        for name, (run, started) in list(active.items()):
            if (status := started.status()) is not None:
                del active[name]
                if not (stop_requested.is_set() and status == INTERRUPTED) and progress.note_end(
                    run, started, status
                ):
                    waiting.insert(0, run)
                on_end()
        if stop_requested.is_set() and not is_passed_on:
            is_passed_on = True
            active = {name: one for name, one in active.items() if one[1].end()}
        time.sleep(POLL_SECONDS)
    return progress.end(is_interrupted=stop_requested.is_set())

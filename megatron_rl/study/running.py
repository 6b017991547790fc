"""Running what a study has not done yet: here, or on SLURM."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from megatron_rl.config import ConfigError, dump_config
from megatron_rl.interruption import INTERRUPTED, end_with_parent
from megatron_rl.runs.lock import LOCK, take_lock
from megatron_rl.runs.rows import read_metrics
from megatron_rl.study.plan import PlannedRun, Study
from megatron_rl.study.state import read_state

POLL_SECONDS = 0.5
SAY_SECONDS = 60.0


class Started(Protocol):
    """A run that was started."""

    log_file: Path

    def status(self) -> int | None:
        """Its exit status; None while it waits or runs."""

    def end(self) -> bool:
        """Ask it to end; whether it does, and is to be waited for."""


# Starts a run; None where what an earlier study left still works on it: to be tried again.
Start = Callable[[Study, PlannedRun], Started | None]


def start_here(study: Study, run: PlannedRun) -> "StartedHere | None":
    """Start a run in processes of this machine."""
    file = run.folder / LOCK
    if file.exists():
        with file.open("a") as lock:
            if not take_lock(lock):
                return None
    return StartedHere(study, run)


class StartedHere:
    """A run in processes of this machine."""

    def __init__(self, study: Study, run: PlannedRun) -> None:
        self.log_file = study.folder / "logs" / f"{run.name}.log"
        command = [sys.executable, "-m", "megatron_rl.cli", "train", "--config"]
        with self.log_file.open("ab") as log:
            # A session of its own: Ctrl-C reaches it through the study alone.
            self._process = subprocess.Popen(
                [*command, str(config_file(study, run))],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - there is one thread
            )  # fmt: skip

    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def end(self) -> bool:
        """It saves its step first."""
        self._process.terminate()
        return True


class StartedOnCluster:
    """A run that was launched on a cluster; it goes on when this process ends."""

    def __init__(self, study: Study, run: PlannedRun, *, cluster_file: str) -> None:
        from megatron_rl.launch.cluster import SlurmCluster, load_cluster
        from megatron_rl.launch.following import is_active
        from megatron_rl.launch.plan import plan_launch
        from megatron_rl.launch.record import find_record, has_record
        from megatron_rl.launch.starting import start_here, start_on_slurm

        cluster = load_cluster(cluster_file)
        start = start_on_slurm if isinstance(cluster, SlurmCluster) else start_here
        earlier = find_record(run.name) if has_record(run.name) else None
        if earlier and earlier.run == str(run.folder) and is_active(earlier):
            self._record = earlier  # an earlier start of the study launched it
        else:
            file = str(config_file(study, run))
            self._record = start(plan_launch(file, cluster, overrides=[], name=run.name))
        self.log_file = Path(self._record.folder) / "logs"
        self._next = 0.0

    def status(self) -> int | None:
        """Its exit status; None while it waits or runs, or was asked for a moment ago."""
        from megatron_rl.launch.following import POLL_SECONDS, final_status, is_active

        if time.monotonic() < self._next:
            return None
        if not is_active(self._record):
            return final_status(self._record)
        self._next = time.monotonic() + POLL_SECONDS
        return None

    def end(self) -> bool:
        """The job goes on; the next start of the study follows it."""
        return False


@dataclass
class Progress:
    """What is said of a study while it runs."""

    study: Study
    say: Callable[[str], None]
    done: int = 0
    failed: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    ended_here: int = 0

    def line(self, running: list[PlannedRun]) -> str:
        """Counts, the step of what runs, the time and a guess of what is left."""
        total = len(self.study.runs)
        parts = [f"{self.study.file.name}: {self.done} of {total} done"]
        if self.failed:
            parts.append(f"{len(self.failed)} failed")
        for run in running:
            rows = read_metrics(run.folder)
            step = rows[-1]["step"] if rows else 0
            parts.append(f"{run.name} {step}/{run.config.trainer.steps}")
        minutes = (time.monotonic() - self.begun) / 60
        parts.append(f"{minutes:.0f} min")
        if self.ended_here:
            left = (total - self.done - len(self.failed)) * minutes / self.ended_here
            parts.append(f"about {left:.0f} left")
        return ", ".join(parts)


def config_file(study: Study, run: PlannedRun) -> Path:
    """Where a run's config lies."""
    return study.folder / "configs" / f"{run.name}.yaml"


def make_tasks(study: Study, run: PlannedRun, python: str, say: Callable[[str], None]) -> bool:
    """Make what the run reads and the study file tells how to make; False where that fails.

    python: an interpreter with torch.
    """
    paths = [run.config.model.path, *(path for path, _ in run.config.prompt_files.values())]
    for folder, settings in study.file.tasks.items():
        asked = any(Path(path).absolute().is_relative_to(Path(folder).absolute()) for path in paths)
        if not asked:
            continue
        if (stamp := Path(folder) / "made.json").is_file():
            there = json.loads(stamp.read_text()).get("settings", {})
            other = [f"{key}={there[key]}, not {value}" for key, value in settings.items()
                     if key != "longest_warm_up" and there.get(key, value) != value]  # fmt: skip
            if other:
                say(
                    f"{run.name} failed: tasks.{folder} was made with {'; '.join(other)}: remove "
                    "it, or name another folder"
                )
                return False
            continue
        say(f"making {folder}")
        options = {f"--{key.replace('_', '-')}": str(value) for key, value in settings.items()}
        command = [python, "-m", "megatron_rl.cli", "task", options.pop("--task", "")]
        command += [word for option in options.items() for word in option]
        # A process of its own: its kernels are chosen before torch is loaded.
        if subprocess.run([*command, "--output", folder], check=False).returncode:
            say(f"{run.name} failed: tasks.{folder} could not be made")
            return False
    return True


@contextmanager
def opened(study: Study) -> Iterator[None]:
    """The study's folder, held by this process; configs are written into it."""
    for folder in ("configs", "runs", "logs"):
        (study.folder / folder).mkdir(parents=True, exist_ok=True)
    with (study.folder / LOCK).open("a") as lock:
        if not take_lock(lock):
            raise ConfigError(
                f"{study.folder} is in use by another `megatron-rl study`; wait until it has "
                "ended, or end it"
            )
        for run in study.runs:
            config_file(study, run).write_text(dump_config(run.config))
        yield


def run_study(
    study: Study,
    *,
    start: Start,
    say: Callable[[str], None],
    on_end: Callable[[], object],
    python: str = sys.executable,
) -> int:
    """Run what is not done; returns the exit status.

    A run that fails does not stop the others. Asked to end by a signal, the runs here save their
    step and end; jobs on a cluster go on. on_end: is called after each run.
    """
    asked = threading.Event()
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, lambda number, frame: asked.set())
    progress = Progress(study, say)
    waiting = []
    for run in study.runs:
        if read_state(run).state == "done":
            progress.done += 1
        else:
            waiting.append(run)
    active: dict[str, tuple[PlannedRun, Started]] = {}
    said, is_passed_on = -math.inf, False
    while active or (waiting and not asked.is_set()):
        for run in [] if asked.is_set() else list(waiting):
            if len(active) >= study.file.side_by_side:
                break
            if not make_tasks(study, run, python, say):
                waiting.remove(run)
                progress.failed.append(run.name)
            elif (started := start(study, run)) is not None:
                waiting.remove(run)
                active[run.name] = run, started
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            say(progress.line([run for run, _ in active.values()]))
        for name, (run, started) in list(active.items()):
            if (status := started.status()) is not None:
                del active[name]
                _note_end(run, started, status, progress)
                on_end()
        if asked.is_set() and not is_passed_on:
            is_passed_on = True
            active = {name: one for name, one in active.items() if one[1].end()}
        time.sleep(POLL_SECONDS)
    say(progress.line([]))
    for name in progress.failed:
        log = study.folder / "logs" / f"{name}.log"  # none where a task could not be made
        say(f"  failed: {name}{f'; {log} says why' if log.is_file() else ''}")
    return INTERRUPTED if asked.is_set() else bool(progress.failed)


def _note_end(run: PlannedRun, started: Started, status: int, progress: Progress) -> None:
    if status == 0 and read_state(run).state == "done":
        progress.done += 1
        progress.ended_here += 1
    elif status != INTERRUPTED:
        progress.failed.append(run.name)
        progress.say(f"{run.name} failed with status {status}: {started.log_file}")

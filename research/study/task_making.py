"""Tasks that the runs of a study read, made before the first run that needs them."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.runtime.interruption import end_with_parent
from research.study.study_plan import PlannedRun, Study
from research.tasks.settings import TaskSettings

POLL_SECONDS = 0.2
DEFAULTS = {field.name: field.default for field in fields(TaskSettings)}


class TaskMaker:
    """Makes tasks, each in its own process; one that fails is not tried again for the next run.

    python: an interpreter that can import torch. stop_requested: ends the process that makes a
    task, which keeps what it has trained.
    """

    def __init__(
        self,
        study: Study,
        python: str,
        *,
        echo: Callable[[str], None],
        stop_requested: threading.Event,
    ) -> None:
        self.study, self.python, self.echo = study, python, echo
        self.stop_requested = stop_requested
        self.failed: set[str] = set()

    def make(self, run: PlannedRun) -> bool:
        """Make the tasks that the run reads; returns False on failure or a request to stop."""
        paths = [run.config.model.path, *(path for path, _ in run.config.prompt_files.values())]
        return all(
            self._make_one(run, folder, settings)
            for folder, settings in self.study.file.tasks.items()
            if any(Path(path).absolute().is_relative_to(Path(folder).absolute()) for path in paths)
        )

    def _make_one(self, run: PlannedRun, folder: str, settings: dict[str, Any]) -> bool:
        if (stamp := Path(folder) / "made.json").is_file():
            # A setting that an earlier version did not have had its default there.
            existing = DEFAULTS | json.loads(stamp.read_text()).get("settings", {})
            different = [
                f"{key}={existing[key]}, not {value}"
                for key, value in settings.items()
                if key != "longest_warm_up" and existing[key] != value
            ]
            if different:
                self.echo(
                    f"{run.name} failed: tasks.{folder} was made with {'; '.join(different)}: "
                    "remove it, or name another folder"
                )
            return not different
        if folder in self.failed:
            self.echo(f"{run.name} failed: tasks.{folder} could not be made (above)")
            return False
        self.echo(f"making {folder}")
        options = {f"--{key.replace('_', '-')}": str(value) for key, value in settings.items()}
        command = [self.python, "-m", "research.tasks", options.pop("--task", "")]
        command += [word for option in options.items() for word in option]
        status = self._run([*command, "--output", folder])
        if status and not self.stop_requested.is_set():
            self.failed.add(folder)
            self.echo(f"{run.name} failed: tasks.{folder} could not be made")
        return not status

    def _run(self, command: list[str]) -> int:
        """Run a command in its own process: kernels are chosen before torch is imported."""
        process = subprocess.Popen(
            command,
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - there is one thread
        )
        while True:
            try:
                return process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if self.stop_requested.is_set():
                    process.terminate()
                    return process.wait() or 1

"""How far each run of a study is, read from its run directory alone."""

from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.config import ConfigError, load_config, with_absolute_paths
from megatron_rl.runs.rows import read_metrics
from megatron_rl.study.plan import PlannedRun, config_digest


@dataclass(frozen=True)
class RunState:
    """A run as it lies on the disk."""

    run: PlannedRun
    state: Literal["new", "begun", "done"]
    rows: list[dict[str, Any]]  # of its metrics

    @property
    def step(self) -> int:
        """The last that was recorded."""
        return int(self.rows[-1]["step"]) if self.rows else 0


def read_state(run: PlannedRun) -> RunState:
    """What was recorded of a run; ConfigError if it was recorded with other settings."""
    rows = read_metrics(run.folder)
    if not rows:
        return RunState(run, "new", rows)
    found = with_absolute_paths(load_config(run.folder / "config.yaml"))
    if config_digest(found) != run.digest:
        raise ConfigError(
            f"{run.folder} was run with other settings than the study now has; restore them "
            "(its config.yaml), give the study another name, or remove the folder"
        )
    # The model is written last, and appears under its name when it is complete.
    done = rows[-1]["step"] == run.config.trainer.steps and (run.folder / "model").is_dir()
    return RunState(run, "done" if done else "begun", rows)

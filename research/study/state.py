"""State of each run of a study, read from its run directory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.config import Config, ConfigError, load_config, with_absolute_paths
from megatron_rl.preflight.hub_names import resolve_hub_names
from megatron_rl.runs.files import is_finished, read_metrics
from research.study.study_plan import PlannedRun, config_digest


@dataclass(frozen=True)
class RunState:
    """State and recorded metrics of a run."""

    run: PlannedRun
    state: Literal["new", "begun", "done"]
    rows: list[dict[str, Any]]  # of its metrics

    @property
    def step(self) -> int:
        """Last recorded step."""
        return int(self.rows[-1]["step"]) if self.rows else 0


def read_state(run: PlannedRun) -> RunState:
    """Read the state of a run; ConfigError if it was recorded with other settings."""
    rows = read_metrics(run.folder)
    if not rows:
        return RunState(run, "new", rows)
    recorded = with_absolute_paths(load_config(run.folder / "config.yaml"))
    recorded = _without_chosen_at_start(recorded, planned=run.config)
    if config_digest(recorded) not in _digests(run):
        raise ConfigError(
            f"{run.folder} was run with other settings than the study now has; restore them "
            "(its config.yaml), give the study another name, or remove the folder"
        )
    done = is_finished(run.folder, steps=run.config.trainer.steps)
    return RunState(run, "done" if done else "begun", rows)


def _digests(run: PlannedRun) -> Iterator[str]:
    """Yield the digest of a run's settings, and that with the folders that its start found."""
    yield run.digest
    yield config_digest(resolve_hub_names(run.config)[0])


def _without_chosen_at_start(recorded: Config, *, planned: Config) -> Config:
    """Return the recorded config with null where a run's first start chooses."""
    update: dict[str, Any] = {}
    if planned.reward.verifier is None:
        update["reward"] = recorded.reward.model_copy(update={"verifier": None})
    if planned.data.date is None:
        update["data"] = recorded.data.model_copy(update={"date": None})
    return recorded.model_copy(update=update)

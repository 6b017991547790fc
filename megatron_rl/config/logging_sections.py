"""Sections of a config for logging in addition to metrics.jsonl."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_rl.config.sections import Section


class WandbSection(Section):
    """Weights & Biases; used only if a project is set."""

    project: str
    """Name of the project."""
    entity: str | None = None
    """User or team; null uses the default of the login."""


class MlflowSection(Section):
    """MLflow; used only if an experiment is set."""

    experiment: str
    """Name of the experiment; created if it does not exist."""
    tracking_uri: str | None = None
    """Address of the tracking server, such as `http://mlflow:5000`; null uses the environment
    variable `MLFLOW_TRACKING_URI`, or MLflow's default."""


class TrackioSection(Section):
    """trackio; used only if a project is set."""

    project: str
    """Name of the project, which `trackio show --project NAME` opens."""


def _check_keep_rollouts(value: Any) -> Any:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_count and value not in ("all", "sampled"):
        raise ValueError(
            "must be all, sampled, or the number of newest steps that keep all rollouts, 1 or more"
        )
    return value


class LoggingSection(Section):
    """Logging in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard files to the run directory."""
    traced_responses: Annotated[int, Field(ge=0)] = 8
    """Number of responses per step, whole groups first, whose log-probs at every epoch are saved in
    `traces/` for the report. They are selected by prompt, so that runs with the same seed select
    the same ones. 0 disables it."""
    sample_every: Annotated[int, Field(ge=0)] = 10
    """Rollout batches between samples (prompt, response, reward) that are printed and sent to
    TensorBoard and W&B, starting with the first batch. 0 disables them."""
    keep_rollouts: Annotated[
        Literal["all", "sampled"] | int, BeforeValidator(_check_keep_rollouts)
    ] = "all"
    """Rollouts that are kept in `rollouts/`: `all` keeps everything, a number N keeps everything of
    the newest N steps and a sample of groups of each older step, `sampled` keeps that sample of
    every step (`docs/reliability.md`)."""
    wandb: WandbSection | None = None
    """Weights & Biases project to log to; null disables it."""
    mlflow: MlflowSection | None = None
    """MLflow experiment to log to; null disables it."""
    trackio: TrackioSection | None = None
    """trackio project to log to; null disables it."""

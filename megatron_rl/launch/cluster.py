"""A cluster file: where jobs run, what they ask for, and how they survive; one YAML per cluster."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from megatron_rl.config import ConfigError, Section, explain, read_mapping
from megatron_rl.config.sections import Count

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)\Z")
# NeMo-Run puts paths into shell lines as they are, and replaces this word in them.
PLAIN_PATH = re.compile(r"[\w./@%+=,-]+\Z")
REWRITTEN = "/nemo_run"


def _require_text(value: Any) -> Any:
    """YAML reads 4:00:00 as the number 14400, and SLURM would take it for minutes."""
    if not isinstance(value, str):
        raise ValueError('write it in quotes, as "04:00:00" or "1-12:00:00"')
    return value


class Container(Section):
    """What the ranks run in, by SLURM's pyxis plugin; the run's folder is mounted by itself."""

    image: str
    """a file on the cluster (.sqsh), or a registry's address"""
    mounts: list[str] = Field(default_factory=list)
    """each as `/on/the/host:/in/the/container`"""


class LocalCluster(Section):
    """This machine."""

    executor: Literal["local"]
    python: str | None = None
    """of the environment to train in; null: `.venv` of this checkout"""
    environment: dict[str, str] = Field(default_factory=dict)
    """variables of every rank; their values are quoted"""

    @model_validator(mode="after")
    def _check(self) -> "LocalCluster":
        wrong = [name for name in self.environment if not VARIABLE.match(name)]
        if wrong:
            raise ValueError(f"environment: {wrong[0]!r} is no name of a variable; rename it")
        return self


class SlurmCluster(LocalCluster):
    """A SLURM cluster, submitted to from a machine that shares its file system."""

    executor: Literal["slurm"]  # type: ignore[assignment]
    partition: str
    """one, or several with commas between them"""
    account: str | None = None
    time_limit: Annotated[str, BeforeValidator(_require_text)]
    """of one job, as "04:00:00" or "1-12:00:00" """
    nodes: Count = 1
    """where `--nodes` does not say"""
    processes_per_node: Count = 8
    """one for each device"""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """asked of SLURM; null: nothing is asked"""
    save_seconds: Annotated[int, Field(ge=1)] = 900
    """how long before its end a job is asked to save: what a step and a checkpoint take"""
    requeue: Annotated[int, Field(ge=0)] = 100
    """how often a job that saved is queued again; 0: never"""
    container: Container | None = None
    sbatch: dict[str, str | int | bool] = Field(default_factory=dict)
    """further options of sbatch, as `qos: high` or `exclusive: true`"""

    @model_validator(mode="after")
    def _check_slurm(self) -> "SlurmCluster":
        problems = []
        if not self.partition.strip():
            problems.append("partition: empty; name one")
        if (seconds := self._seconds()) is None:
            problems.append(
                f"time_limit={self.time_limit!r}: write it as hours, minutes and seconds, as "
                '"04:00:00" or "1-12:00:00"'
            )
        elif self.save_seconds >= seconds:
            problems.append(
                f"save_seconds={self.save_seconds} leaves nothing of time_limit="
                f"{self.time_limit}; lower it, or ask for more time"
            )
        for mount in self.container.mounts if self.container else []:
            if mount.count(":") not in (1, 2) or not all(mount.split(":")):
                problems.append(f"container.mounts: {mount!r} is not of the form /host:/inside")
        problems += [
            f"sbatch.{key}: set by {mine} itself; remove it"
            for key, mine in OWN_FLAGS.items()
            if key in {name.replace("-", "_") for name in self.sbatch}
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _seconds(self) -> int | None:
        found = TIME_LIMIT.match(self.time_limit)
        if found is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


OWN_FLAGS = {
    "nodes": "nodes, or --nodes", "ntasks_per_node": "processes_per_node", "time": "time_limit",
    "partition": "partition", "account": "account", "gpus_per_node": "gpus_per_node",
    "signal": "save_seconds", "job_name": "the run's name", "output": "the launcher",
    "requeue": "requeue", "no_requeue": "requeue", "dependency": "--chain",
}  # fmt: skip
Cluster = LocalCluster | SlurmCluster


def load_cluster(path: str | Path) -> Cluster:
    """The cluster in a YAML file; ConfigError lists every wrong key and value with its cure."""
    values = read_mapping(path, "cluster")
    kinds: dict[Any, type[LocalCluster]] = {"local": LocalCluster, "slurm": SlurmCluster}
    if (kind := values.get("executor")) not in kinds:
        raise ConfigError(f"{path}: executor={kind!r}: must be local or slurm")
    try:
        return kinds[kind].model_validate(values)
    except ValidationError as error:
        problems = "\n  ".join(explain(error, kinds[kind]))
        raise ConfigError(f"wrong cluster file {path}:\n  {problems}") from None


def plain_path(path: Path) -> Path:
    """The path itself; ConfigError where NeMo-Run would not hand it on as it is."""
    if not PLAIN_PATH.match(str(path)) or REWRITTEN in str(path):
        raise ConfigError(
            f"{path}: NeMo-Run does not quote paths and rewrites {REWRITTEN!r} in them; use a "
            "folder named by letters, digits and . _ - + = @ % ,"
        )
    return path

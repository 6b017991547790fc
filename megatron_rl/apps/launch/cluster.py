"""Cluster files: one YAML file per cluster, with resources, time limits and requeueing of jobs."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from megatron_rl.config import ConfigError, Section, explain, read_mapping
from megatron_rl.config.sections import Count

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)\Z")
# NeMo-Run does not quote paths in shell scripts, and replaces this word in them.
PLAIN_PATH = re.compile(r"[\w./@%+=,-]+\Z")
REWRITTEN = "/nemo_run"


def _require_text(value: Any) -> Any:
    """Reject numbers: YAML parses 4:00:00 as 14400, which SLURM would read as minutes."""
    if not isinstance(value, str):
        raise ValueError('write it in quotes, as "04:00:00" or "1-12:00:00"')
    return value


class Container(Section):
    """Container of the ranks, for SLURM's pyxis plugin; the run directory is always mounted."""

    image: str
    """Image file on the cluster (.sqsh), or the address of an image in a registry."""
    mounts: list[str] = Field(default_factory=list)
    """Mounts, each written as `/on/the/host:/in/the/container`."""


class LocalCluster(Section):
    """This machine."""

    executor: Literal["local"]
    python: str | None = None
    """Python interpreter of the training environment; null uses `.venv` of this checkout."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every rank; their values are quoted."""

    @model_validator(mode="after")
    def _check(self) -> "LocalCluster":
        invalid = [name for name in self.environment if not VARIABLE.match(name)]
        if invalid:
            raise ValueError(f"environment: {invalid[0]!r} is no name of a variable; rename it")
        return self


class SlurmCluster(LocalCluster):
    """SLURM cluster whose file system this machine shares."""

    executor: Literal["slurm"]  # type: ignore[assignment]
    partition: str
    """Partition, or several separated by commas."""
    account: str | None = None
    time_limit: Annotated[str, BeforeValidator(_require_text)]
    """Time limit of one job, for example "04:00:00" or "1-12:00:00"."""
    nodes: Count = 1
    """Number of nodes, unless `--nodes` is given."""
    processes_per_node: Count = 8
    """Processes per node, one per device."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs per node to request from SLURM; null requests none."""
    save_seconds: Annotated[int, Field(ge=1)] = 900
    """Seconds before the time limit at which a job starts saving; must cover a step and a
    checkpoint."""
    requeue: Annotated[int, Field(ge=0)] = 100
    """Maximum number of times that a job is requeued after saving; 0 disables requeueing."""
    container: Container | None = None
    sbatch: dict[str, str | int | bool] = Field(default_factory=dict)
    """Additional options of sbatch, for example `qos: high` or `exclusive: true`."""

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
        match = TIME_LIMIT.match(self.time_limit)
        if match is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


OWN_FLAGS = {
    "nodes": "nodes, or --nodes", "ntasks_per_node": "processes_per_node", "time": "time_limit",
    "partition": "partition", "account": "account", "gpus_per_node": "gpus_per_node",
    "signal": "save_seconds", "job_name": "the run's name", "output": "the launcher",
    "requeue": "requeue", "no_requeue": "requeue", "dependency": "--chain",
}  # fmt: skip
Cluster = LocalCluster | SlurmCluster


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file; ConfigError lists every wrong key and value with its cure."""
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
    """Return the path; raises ConfigError if NeMo-Run would modify it."""
    if not PLAIN_PATH.match(str(path)) or REWRITTEN in str(path):
        raise ConfigError(
            f"{path}: NeMo-Run does not quote paths and rewrites {REWRITTEN!r} in them; use a "
            "folder named by letters, digits and . _ - + = @ % ,"
        )
    return path

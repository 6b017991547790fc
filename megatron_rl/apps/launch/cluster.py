"""Cluster files: one YAML file per cluster, with resources, time limits and requeueing of jobs."""

import re
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from megatron_rl.config import ConfigError, Section, explain, read_mapping
from megatron_rl.config.sections import Count, PathText

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)\Z")
# NeMo-Run does not quote paths in shell scripts, and replaces this word in them.
PLAIN_PATH = re.compile(r"[\w./@%+=,-]+\Z")
REWRITTEN = "/nemo_run"


class Container(Section):
    """Container of the ranks; the run directory is always mounted."""

    image: PathText
    """Image file on the cluster (.sqsh for pyxis, .sif for apptainer), or the address of an image
    in a registry."""
    mounts: list[PathText] = Field(default_factory=list)
    """Mounts, each written as `/on/the/host:/in/the/container`."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Program that starts containers: SLURM's plugin pyxis, or apptainer, which each rank calls."""
    options: list[str] = Field(default_factory=list)
    """Additional options of `srun` for pyxis, or of `apptainer exec`, such as `--no-home`."""


class LocalCluster(Section):
    """This machine."""

    executor: Literal["local"]
    python: PathText | None = None
    """Python interpreter of the training environment; null uses `.venv` of this checkout."""
    setup: list[str] = Field(default_factory=list)
    """Lines of bash that every rank runs before the program, such as `module load cuda/12.8`; a
    line that fails ends the rank. In a container they run inside it."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every rank, set after `setup`; their values are quoted."""

    @model_validator(mode="after")
    def _check(self) -> "LocalCluster":
        invalid = [name for name in self.environment if not VARIABLE.match(name)]
        if invalid:
            raise ValueError(f"environment: {invalid[0]!r} is no name of a variable; rename it")
        for line in self.setup:
            if (problem := _bash_problem(line)) is not None:
                raise ValueError(
                    f"setup: {line!r} is no complete command of bash ({problem}); correct it"
                )
        return self


class SlurmCluster(LocalCluster):
    """SLURM cluster whose file system this machine shares."""

    executor: Literal["slurm"]  # type: ignore[assignment]
    partition: str
    """Partition, or several separated by commas."""
    account: str | None = None
    time_limit: str
    """Time limit of one job, for example "04:00:00" or "1-12:00:00"."""
    nodes: Count = 1
    """Number of nodes, unless `--nodes` is given."""
    processes_per_node: Count = 8
    """Processes per node, one per device."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs per node to request from SLURM; null requests none."""
    cpus_per_task: Count | None = None
    """CPU cores of each process; null leaves it to SLURM, which often gives one."""
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


def _bash_problem(line: str) -> str | None:
    """Return bash's message about the syntax of a line, or None (also where there is no bash)."""
    try:
        done = subprocess.run(
            ["bash", "-n"], input=line, capture_output=True, check=False, timeout=10,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    last = done.stderr.strip().splitlines()[-1:]
    return last[0].partition(": ")[2] if done.returncode and last else None


OWN_FLAGS = {
    "nodes": "nodes, or --nodes", "ntasks_per_node": "processes_per_node", "time": "time_limit",
    "partition": "partition", "account": "account", "gpus_per_node": "gpus_per_node",
    "signal": "save_seconds", "job_name": "the run's name", "output": "the launcher",
    "requeue": "requeue", "no_requeue": "requeue", "dependency": "--chain",
    "cpus_per_task": "cpus_per_task",
}  # fmt: skip
# what cluster files of other launchers have
_ELSEWHERE = {
    **dict.fromkeys(("modules", "module", "prologue", "setup_lines", "pre_launch", "source"),
                    "setup: [module load NAME, ...]"),
    **dict.fromkeys(("env", "env_vars", "environment_variables", "export"), "environment"),
    **dict.fromkeys(("time", "walltime", "wall_time"), "time_limit"),
    **dict.fromkeys(("image", "container_image"), "container: {image: ...}"),
    **dict.fromkeys(("mounts", "container_mounts"), "container: {image: ..., mounts: [...]}"),
    **dict.fromkeys(("ntasks_per_node", "tasks_per_node", "ntasks"), "processes_per_node"),
    **dict.fromkeys(("gpus", "gres", "devices"), "gpus_per_node"),
    **dict.fromkeys(("cpus", "cores"), "cpus_per_task"),
    **dict.fromkeys(("queue",), "partition"),
    **dict.fromkeys(("num_nodes",), "nodes"),
    **dict.fromkeys(("qos", "mem", "constraint", "exclusive", "reservation", "nodelist", "exclude",
                     "mail_user", "comment", "licenses"), "sbatch: {NAME: ...}"),
}  # fmt: skip
Cluster = LocalCluster | SlurmCluster


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file; ConfigError lists every wrong key and value with its cure."""
    values = read_mapping(path, "cluster", SlurmCluster)
    kinds: dict[Any, type[LocalCluster]] = {"local": LocalCluster, "slurm": SlurmCluster}
    if (kind := values.get("executor")) not in kinds:
        raise ConfigError(f"{path}: executor={kind!r}: must be local or slurm")
    try:
        return kinds[kind].model_validate(values)
    except ValidationError as error:
        problems = "\n  ".join(explain(error, kinds[kind], file=path, others=_from_elsewhere))
        raise ConfigError(f"wrong cluster file {path}:\n  {problems}") from None


def _from_elsewhere(key: str, value: Any) -> list[str]:
    name = key.replace("-", "_")
    if (ours := _ELSEWHERE.get(name)) is None:
        return []
    return [f"{key}: unknown key; use {ours.replace('NAME: ', f'{name}: ')}"]


def plain_path(path: Path) -> Path:
    """Return the path; raises ConfigError if NeMo-Run would modify it."""
    if not PLAIN_PATH.match(str(path)) or REWRITTEN in str(path):
        raise ConfigError(
            f"{path}: NeMo-Run does not quote paths and rewrites {REWRITTEN!r} in them; use a "
            "folder named by letters, digits and . _ - + = @ % ,"
        )
    return path

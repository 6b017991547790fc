"""Asking SLURM: whether it answers, what it would refuse, what became of a job."""

import re
import subprocess
from dataclasses import dataclass

from megatron_rl.config import ConfigError
from megatron_rl.launch.cluster import SlurmCluster

# squeue(1), JOB STATE CODES: those after which nothing follows
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT",
}  # fmt: skip
SECONDS = 60


@dataclass(frozen=True)
class JobState:
    """What SLURM says of a job."""

    job: str
    state: str  # UNKNOWN where SLURM has forgotten it
    reason: str = ""
    elapsed: str = ""
    left: str = ""
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing follows."""
        return self.state in ENDED or self.state == "UNKNOWN"


def check_cluster(cluster: SlurmCluster) -> None:
    """ConfigError where SLURM cannot be reached or lacks what the cluster file names."""
    said = _ask("scontrol", "ping")
    if said.returncode or " is UP" not in said.stdout:
        raise ConfigError(
            f"SLURM cannot be reached (scontrol ping: {_one_line(said)}); launch from a login node "
            "of the cluster, and see that its controller runs"
        )
    there = set(_ask("sinfo", "--noheader", "--format=%R").stdout.split())
    missing = [one for one in cluster.partition.split(",") if one not in there]
    if missing:
        raise ConfigError(
            f"partition: this cluster has no {missing[0]}; it has {', '.join(sorted(there))}"
        )
    if cluster.container and "--container-image" not in _ask("srun", "--help").stdout:
        raise ConfigError(
            "container: this SLURM's srun has no --container-image (the plugin pyxis); install the "
            "plugin, or remove container from the cluster file"
        )


def check_script(script: str) -> None:
    """ConfigError with SLURM's own words where it would refuse the batch script."""
    said = _ask("sbatch", "--test-only", input=script)
    if said.returncode:
        raise ConfigError(f"SLURM would refuse this job: {_one_line(said)}")


def job_state(job: str) -> JobState:
    """The present state of a job; ConfigError where SLURM cannot be asked."""
    layout = "%T|%r|%M|%L|%N"
    said = _ask("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={layout}")
    if said.returncode and "Invalid job id" not in said.stderr:
        raise ConfigError(f"squeue failed: {_one_line(said)}")
    for line in said.stdout.splitlines():
        return JobState(job, *line.split("|"))
    said = _ask("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}",
                "--format=State,Elapsed,NodeList")  # fmt: skip
    for line in said.stdout.splitlines() if said.returncode == 0 else []:
        state, elapsed, nodes = line.split("|")
        return JobState(job, state.split()[0], elapsed=elapsed, nodes=nodes)
    return JobState(job, "UNKNOWN", reason="SLURM has forgotten it")


def cancel_jobs(jobs: list[str]) -> None:
    """End jobs, waiting or running; ConfigError with SLURM's words where it refuses."""
    said = _ask("scancel", *jobs)
    if said.returncode:
        raise ConfigError(f"scancel failed: {_one_line(said)}")


def _ask(*command: str, input: str | None = None) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, input=input, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {SECONDS} s")
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} is not on the PATH")


def _one_line(said: "subprocess.CompletedProcess[str]") -> str:
    return re.sub(r"\s+", " ", said.stderr.strip() or said.stdout.strip()) or "nothing was said"

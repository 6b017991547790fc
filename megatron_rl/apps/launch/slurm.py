"""SLURM commands: availability, validation of batch scripts, and job states."""

import re
import subprocess
from dataclasses import dataclass

from megatron_rl.apps.launch.cluster import SlurmCluster
from megatron_rl.config import ConfigError

# Terminal states; see JOB STATE CODES in squeue(1).
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT",
}  # fmt: skip
SECONDS = 60


@dataclass(frozen=True)
class JobState:
    """State of a job as reported by SLURM."""

    job: str
    state: str  # UNKNOWN if SLURM has no record of it
    reason: str = ""
    elapsed: str = ""
    left: str = ""
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        """True in a terminal state."""
        return self.state in ENDED or self.state == "UNKNOWN"


def check_cluster(cluster: SlurmCluster) -> None:
    """Raise ConfigError if SLURM is unreachable or lacks a resource that the cluster file names."""
    output = _ask("scontrol", "ping")
    if output.returncode or " is UP" not in output.stdout:
        raise ConfigError(
            f"SLURM cannot be reached (scontrol ping: {_one_line(output)}); launch from a login "
            "node of the cluster, and check that its controller runs; elsewhere `--dry-run "
            "--offline` shows what would be submitted"
        )
    existing = set(_ask("sinfo", "--noheader", "--format=%R").stdout.split())
    missing = [name for name in cluster.partition.split(",") if name not in existing]
    if missing:
        raise ConfigError(
            f"partition: this cluster has no {missing[0]}; it has {', '.join(sorted(existing))}"
        )
    is_pyxis = cluster.container is not None and cluster.container.runtime == "pyxis"
    if is_pyxis and "--container-image" not in _ask("srun", "--help").stdout:
        raise ConfigError(
            "container: this SLURM's srun has no --container-image (the plugin pyxis); install the "
            "plugin, set container.runtime: apptainer, or remove container from the cluster file"
        )


def check_script(script: str) -> None:
    """Raise ConfigError with SLURM's message if it would reject the batch script."""
    output = _ask("sbatch", "--test-only", input=script)
    if output.returncode:
        raise ConfigError(f"SLURM would refuse this job: {_one_line(output)}")


def job_state(job: str) -> JobState:
    """Return the current state of a job; raises ConfigError if SLURM cannot be queried."""
    layout = "%T|%r|%M|%L|%N"
    output = _ask("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={layout}")
    if output.returncode and "Invalid job id" not in output.stderr:
        raise ConfigError(f"squeue failed: {_one_line(output)}")
    for line in output.stdout.splitlines():
        return JobState(job, *line.split("|"))
    output = _ask("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}",
                "--format=State,Elapsed,NodeList")  # fmt: skip
    for line in output.stdout.splitlines() if output.returncode == 0 else []:
        state, elapsed, nodes = line.split("|")
        return JobState(job, state.split()[0], elapsed=elapsed, nodes=nodes)
    return JobState(job, "UNKNOWN", reason="SLURM has forgotten it")


def cancel_jobs(jobs: list[str]) -> None:
    """Cancel pending or running jobs; raises ConfigError with SLURM's message if it fails."""
    output = _ask("scancel", *jobs)
    if output.returncode:
        raise ConfigError(f"scancel failed: {_one_line(output)}")


def _ask(*command: str, input: str | None = None) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command,
            input=input,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {SECONDS} s")
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} is not on the PATH")


def _one_line(output: "subprocess.CompletedProcess[str]") -> str:
    """Join the distinct lines of a command's output."""
    lines = (output.stderr.strip() or output.stdout.strip()).splitlines()
    # scontrol repeats its error for each controller that it tries
    distinct = dict.fromkeys(re.sub(r"\s+", " ", line).strip() for line in lines)
    return "; ".join(line for line in distinct if line) or "no output"

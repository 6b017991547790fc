"""SLURM: shell scripts of a job, its batch script, and the commands sbatch, squeue and scancel."""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.apps.launch.cluster import Container, SlurmCluster
from megatron_rl.apps.launch.launch_plan import Launch
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


# Exit statuses of an interrupted run: 75 after saving; 128 + SIGTERM or SIGUSR1 during start-up.
INTERRUPTED_STATUSES = (75, 143, 138)
EXITS = "exits"  # file with one line per exit of a job: id, number of restarts, status
LAUNCHER_LOG = "launcher.log"  # in `logs`: output of the launcher process of a local run
INSIDE = "inside.sh"  # what apptainer runs; `rank.sh` starts it
FIRST = ".first-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"  # status of the rank that failed first


def rank_script(launch: Launch) -> str:
    """Return the script that srun runs for each process; a local run starts its own processes.

    On SLURM the first rank that fails records its status. srun then terminates the other ranks and
    reports the highest status, and a rank that has not started exits with status 75: without the
    record, a run that fails on one rank would be requeued repeatedly.
    """
    lines = ["#!/usr/bin/env bash", f"# Each rank of {launch.name}; written by megatron-rl launch."]
    if isinstance(launch.cluster, SlurmCluster):
        lines += [
            "stopped=",
            "trap stopped=1 TERM USR1 INT HUP  # the command takes them",
            "finish() {",
            f'    [ "$1" -eq 0 ] || (set -C; echo "$1" >{_first(launch)}) 2>/dev/null',
            '    exit "$1"',
            "}",
        ]
    else:
        lines += ['finish() { exit "$1"; }']
    if launch.apptainer is not None:
        lines += [shlex.join(_apptainer(launch, launch.apptainer)), "finish $?"]
    else:
        lines += program_lines(launch)
    return "\n".join(lines) + "\n"


def program_lines(launch: Launch) -> list[str]:
    """Return the lines of bash that set up and run the program of a rank."""
    source = shlex.quote(str(launch.folder / "source"))
    lines = []
    for line in launch.cluster.setup:  # the newline ends a comment or a here-document
        message = shlex.quote(f"megatron-rl: error: setup: {line} failed with status")
        lines += ["{", line, f'}} || {{ echo {message} "$?" >&2; finish 1; }}']
    if launch.cluster.setup:
        lines += ['[ -z "${stopped:-}" ] || finish 143  # by a signal before the command started']
    lines += [
        f"cd {source} || finish 1",
        f"export PYTHONPATH={source}${{PYTHONPATH:+:$PYTHONPATH}}",
        *(
            f"export {name}={shlex.quote(value)}"
            for name, value in launch.cluster.environment.items()
        ),
    ]
    if isinstance(launch.cluster, SlurmCluster) and launch.apptainer is None:
        return [*lines, shlex.join(command(launch)), "finish $?"]
    return [*lines, f"exec {shlex.join(command(launch))}"]  # gets the signals of the script


def inside_script(launch: Launch) -> str:
    """Return the script that apptainer runs inside the container, after `rank_script`."""
    lines = ["#!/usr/bin/env bash", 'finish() { exit "$1"; }', *program_lines(launch)]
    return "\n".join(lines) + "\n"


def _apptainer(launch: Launch, container: Container) -> list[str]:
    """Return the command that starts the container of a rank."""
    assert isinstance(launch.cluster, SlurmCluster), "only SLURM clusters have containers"
    mounts = [*container.mounts, f"{launch.run_folder}:{launch.run_folder}"]
    binds = [word for mount in mounts for word in ("--bind", mount)]
    devices = ["--nv"] if launch.cluster.gpus_per_node else []
    inside = str(launch.folder / INSIDE)
    options = [*devices, *binds, *container.options]
    return ["apptainer", "exec", *options, container.image, "bash", inside]


def command(launch: Launch) -> list[str]:
    """Return the training command of a rank."""
    config = str(launch.folder / "config.yaml")
    return [launch.python, "-m", "megatron_rl.cli", "train", "--config", config]


def _first(launch: Launch) -> str:
    return f"{shlex.quote(str(launch.folder))}/{FIRST}"


def local_script(launch: Launch) -> str:
    """Return the script of a local run, which records its process id and status."""
    folder = shlex.quote(str(launch.folder))
    return (
        "#!/usr/bin/env bash\n"
        f"bash {folder}/rank.sh >>{folder}/logs/ranks.log 2>&1 &\n"
        f"echo $! >{folder}/pid\n"
        "wait $!\n"
        "status=$?\n"
        f"rm -f {folder}/pid\n"
        f'echo "local 0 $status" >>{folder}/{EXITS}\n'
        "exit $status\n"
    )


def batch_lines(launch: Launch, *, requeue: int, link: int) -> str:
    """Return the part of the batch script before srun; `link` is the job's number in its chain."""
    quoted = {
        "exits": launch.folder / EXITS,
        "stalls": launch.run_folder / "stalls",
        "metrics": launch.run_folder / "metrics.jsonl",
        "interrupted": " ".join(map(str, INTERRUPTED_STATUSES)),
        "requeue": requeue,
        "link": link,
        "preempt_after": "" if launch.preempt_after is None else launch.preempt_after,
    }
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in quoted.items()]
    script = Path(__file__).with_name("batch.sh").read_text(encoding="utf-8")
    return "\n".join(["set +xv", *lines, f"first_status={_first(launch)}", script])

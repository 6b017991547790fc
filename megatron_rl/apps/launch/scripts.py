"""Shell scripts of a job: the command of each rank, and the batch script around it."""

import shlex
from pathlib import Path

from megatron_rl.apps.launch.cluster import Container, SlurmCluster
from megatron_rl.apps.launch.launch_plan import Launch

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

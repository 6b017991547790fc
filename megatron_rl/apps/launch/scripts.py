"""Shell scripts of a job: the command of each rank, and the batch script around it."""

import shlex

from megatron_rl.apps.launch.cluster import SlurmCluster
from megatron_rl.apps.launch.launch_plan import Launch

# Exit statuses of an interrupted run: 75 after saving; 128 + SIGTERM or SIGUSR1 during start-up.
INTERRUPTED_STATUSES = (75, 143, 138)
EXITS = "exits"  # file with one line per exit of a job: id, number of restarts, status
LAUNCHER_LOG = "launcher.log"  # in `logs`: output of the launcher process of a local run
FIRST = ".first-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"  # status of the rank that failed first


def rank_script(launch: Launch) -> str:
    """Return the script that srun runs for each process; a local run starts its own processes.

    On SLURM the first rank that fails records its status. srun then terminates the other ranks and
    reports the highest status, and a rank that has not started exits with status 75: without the
    record, a run that fails on one rank would be requeued repeatedly.
    """
    source = shlex.quote(str(launch.folder / "source"))
    run = [f"exec {shlex.join(command(launch))}"]
    if isinstance(launch.cluster, SlurmCluster):
        run = [
            "trap : TERM USR1 INT HUP  # the command takes them",
            shlex.join(command(launch)),
            "status=$?",
            f'[ "$status" -eq 0 ] || (set -C; echo "$status" >{_first(launch)}) 2>/dev/null',
            'exit "$status"',
        ]
    lines = [
        "#!/usr/bin/env bash",
        f"# Each rank of {launch.name}; written by megatron-rl launch.",
        f"cd {source} || exit 1",
        f"export PYTHONPATH={source}${{PYTHONPATH:+:$PYTHONPATH}}",
        *(
            f"export {name}={shlex.quote(value)}"
            for name, value in launch.cluster.environment.items()
        ),
        *run,
    ]
    return "\n".join(lines) + "\n"


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
    """Return the part of the batch script before srun; `link` is the job's number in its chain.

    It appends each exit to the file `exits`, and requeues a job that was interrupted and had time
    to save, that hung, or that lost a node: its other ranks fail long before SLURM notices. SLURM
    itself requeues jobs that it preempts without grace time, and a job that a user cancels must
    stay cancelled: therefore only a job that is still running is requeued.
    """
    folder = shlex.quote(str(launch.folder))
    stalls = shlex.quote(str(launch.run_folder / "stalls"))
    interrupted = "|".join(str(status) for status in INTERRUPTED_STATUSES)
    interrupted_and_running = "|".join(f"{status}:RUNNING" for status in INTERRUPTED_STATUSES)
    lines = [
        "set +xv",
        "unset SLURM_UNBUFFEREDIO  # with it ranks write to terminals, and draw progress bars",
        f"exits={folder}/{EXITS}",
        "began=$(date +%s)",
    ]
    if link > 1:
        lines += [
            "# What the job before this one left to do.",
            'earlier=$(tail -n 1 "$exits" 2>/dev/null | cut -d" " -f3)',
            f'case "$earlier" in ""|{interrupted}) ;; *) exit "$earlier" ;; esac',
        ]
    lines += [
        "finish() {",
        "    status=$?",
        "    set +e",
        f'    [ "$status" -ne 0 ] && status=$(cat {_first(launch)} 2>/dev/null || echo $status)',
        f'    [ "$status" -ne 0 ] && hung && status={INTERRUPTED_STATUSES[0]}  # by the watchdog',
        '    kill $preemption 2>/dev/null',
        '    echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $status" >>"$exits"',
        '    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)',
        '    again=""',
        '    case "$status:$state" in',
        "        0:*) ;;",
        f"        {interrupted_and_running}) again='it was interrupted' ;;",
        "        *:RUNNING) all_nodes_answer || again='a node does not answer' ;;",
        "    esac",
        f'    if [ -n "$again" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeue} ]; then',
        '        echo "queued again: $again"',
        '        scontrol requeue "$SLURM_JOB_ID"',
        "    fi",
        "}",
        f'hung() {{ [ -n "$(find {stalls} -type f -newermt "@$began" 2>/dev/null)" ]; }}',
        "all_nodes_answer() {",
        '    timeout 60 srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\',
        '        --ntasks="$SLURM_JOB_NUM_NODES" true',
        "}",
        "trap finish EXIT",
        "trap 'exit 143' TERM  # else the status would be that of the command before srun",
    ]  # fmt: skip
    if launch.preempt_after is not None and link == 1:
        lines += _simulated_preemption(launch)
    return "\n".join(lines)


def _simulated_preemption(launch: Launch) -> list[str]:
    """Return the lines that interrupt the job, as a preemption would, after some more steps."""
    metrics = shlex.quote(str(launch.run_folder / "metrics.jsonl"))
    return [
        'if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ]; then',
        "    (",
        f"        rows() {{ wc -l <{metrics} 2>/dev/null || echo 0; }}",
        "        first=$(rows)",
        '        [ "$first" -eq 0 ] && first=1  # the row of step 0',
        f'        until [ "$(rows)" -ge $((first + {launch.preempt_after})) ]; do sleep 1; done',
        '        echo "simulating a preemption"',
        '        scancel --signal=TERM "$SLURM_JOB_ID"',
        "    ) &",
        "    preemption=$!",
        "fi",
    ]

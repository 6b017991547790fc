"""The shell of a job: what each rank runs, and what the batch script does around it."""

import shlex

from megatron_rl.launch.cluster import SlurmCluster
from megatron_rl.launch.plan import Launch

# Ended because it was asked to: 75 after saving; 128 + SIGTERM or SIGUSR1 before it listened.
ASKED_TO_END = (75, 143, 138)
EXITS = "exits"  # a line for each end of a job: its id, how often it was restarted, its status
FIRST = ".first-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"  # status of the rank that failed first


def rank_script(launch: Launch) -> str:
    """What srun starts once for each process; on one machine it starts them itself.

    On SLURM the first rank that does not end well leaves its status. srun then asks the others to
    end, of whom one that has not begun says 75, and reports the highest: a run that one rank alone
    refuses would be queued again and again.
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
    """The training command of a rank."""
    config = str(launch.folder / "config.yaml")
    return [launch.python, "-m", "megatron_rl.cli", "train", "--config", config]


def _first(launch: Launch) -> str:
    return f"{shlex.quote(str(launch.folder))}/{FIRST}"


def local_script(launch: Launch) -> str:
    """The rank's script on one machine: its process id and its status are kept."""
    folder = shlex.quote(str(launch.folder))
    return (
        "#!/usr/bin/env bash\n"
        f"bash {folder}/rank.sh >>{folder}/logs/ranks.log 2>&1 &\n"
        f"echo $! >{folder}/pid\n"
        "wait $!\n"
        "status=$?\n"
        f'echo "local 0 $status" >>{folder}/{EXITS}\n'
        "exit $status\n"
    )


def batch_lines(launch: Launch, *, requeue: int, link: int) -> str:
    """What the batch script does before srun; `link` counts the jobs of a chain from 1.

    It leaves each end in the file `exits`, and queues a job again that was asked to end and had the
    time to save, that hung, or that lost a node: the other ranks then fail long before SLURM knows.
    SLURM itself requeues what it preempts without a grace time, and what a user cancels must stay
    so: only a job that is still running is queued again.
    """
    folder = shlex.quote(str(launch.folder))
    stalls = shlex.quote(str(launch.run_folder / "stalls"))
    asked = "|".join(str(status) for status in ASKED_TO_END)
    asked_and_running = "|".join(f"{status}:RUNNING" for status in ASKED_TO_END)
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
            f'case "$earlier" in ""|{asked}) ;; *) exit "$earlier" ;; esac',
        ]
    lines += [
        "finish() {",
        "    status=$?",
        "    set +e",
        f'    [ "$status" -ne 0 ] && status=$(cat {_first(launch)} 2>/dev/null || echo $status)',
        f'    [ "$status" -ne 0 ] && hung && status={ASKED_TO_END[0]}  # its watcher has ended it',
        '    kill $rehearsal 2>/dev/null',
        '    echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $status" >>"$exits"',
        '    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)',
        '    again=""',
        '    case "$status:$state" in',
        "        0:*) ;;",
        f"        {asked_and_running}) again='it was asked to end' ;;",
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
    if launch.rehearse_after is not None and link == 1:
        lines += _rehearsal(launch)
    return "\n".join(lines)


def _rehearsal(launch: Launch) -> list[str]:
    """Ask the job to end, as a preemption does, once so many more steps are recorded."""
    metrics = shlex.quote(str(launch.run_folder / "metrics.jsonl"))
    return [
        'if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ]; then',
        "    (",
        f"        rows() {{ wc -l <{metrics} 2>/dev/null || echo 0; }}",
        "        first=$(rows)",
        '        [ "$first" -eq 0 ] && first=1  # the row of step 0',
        f'        until [ "$(rows)" -ge $((first + {launch.rehearse_after})) ]; do sleep 1; done',
        '        echo "rehearsing a preemption"',
        '        scancel --signal=TERM "$SLURM_JOB_ID"',
        "    ) &",
        "    rehearsal=$!",
        "fi",
    ]

"""What became of a launch: its state, its output, its end."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.launch import slurm
from megatron_rl.launch.record import Record
from megatron_rl.launch.scripts import ASKED_TO_END, EXITS
from megatron_rl.runs.rows import read_metrics

POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Exit:
    """One end of a job, as its batch script saw it."""

    job: str
    restarts: int
    status: int


def read_exits(folder: str) -> list[Exit]:
    """Every end so far, oldest first."""
    file = Path(folder) / EXITS
    lines = file.read_text().splitlines() if file.exists() else []
    parts = [line.split() for line in lines]
    return [Exit(job, int(restarts), int(status)) for job, restarts, status in parts]


def is_active(record: Record) -> bool:
    """Whether anything of a launch still waits or runs."""
    if record.process is not None:
        return _is_alive(record)
    return any(not slurm.job_state(job).has_ended for job in record.jobs)


def final_status(record: Record) -> int:
    """0 if a launch that has ended did what it was to do, else why not: its own exit status, or 1.

    A job that SLURM ended by itself (a lost node, a limit that passed before it had saved) leaves
    no status; then SLURM's word counts, of the last job that began.
    """
    exits = read_exits(record.folder)
    if record.process is not None:
        return exits[-1].status if exits else 1
    last = slurm.job_state(record.jobs[-1])
    if last.state == "UNKNOWN":
        return exits[-1].status if exits else 1
    if last.state == "COMPLETED":
        return 0
    of_last = [each.status for each in exits if each.job == last.job and each.status]
    return of_last[-1] if of_last and last.state == "FAILED" else 1


def describe(record: Record) -> tuple[str, int]:
    """What `megatron-rl status` prints, and its exit status: 0 unless the launch has failed."""
    lines, active = [], is_active(record)
    status = 0 if active else final_status(record)
    if record.process is not None:
        state = "RUNNING" if active else ("COMPLETED" if status == 0 else "FAILED")
        where = f"process {record.process} on {record.host}"
        lines.append(f"{record.name}: {state} ({where})" + (f", status {status}" if status else ""))
    for job in record.jobs:
        lines.append(f"{record.name}: {_describe_job(slurm.job_state(job))}")
    for each in read_exits(record.folder):
        meaning = {0: "done", **dict.fromkeys(ASKED_TO_END, "asked to end")}
        restarted = f", restarted {each.restarts} times" if each.restarts else ""
        lines.append(
            f"  job {each.job} ended with status {each.status} "
            f"({meaning.get(each.status, 'failed')}){restarted}"
        )
    lines += _describe_run(record)
    return "\n".join(lines), status


def _describe_job(state: slurm.JobState) -> str:
    reason = f" ({state.reason})" if state.reason not in ("", "None") else ""
    where = f" on {state.nodes}" if state.nodes else ""
    since = f", for {state.elapsed}" if state.elapsed not in ("", "0:00") else ""
    left = f", {state.left} left" if state.left and not state.has_ended else ""
    return f"job {state.job} {state.state}{reason}{where}{since}{left}"


def _describe_run(record: Record) -> list[str]:
    rows = read_metrics(Path(record.run))
    lines = [f"  run directory: {record.run}"]
    if rows:
        reward = rows[-1].get("reward/mean")
        said = f", reward {reward:.3f}" if isinstance(reward, float) else ""
        lines.append(f"  step {rows[-1]['step']} of {record.steps}{said}")
    checkpoints = sorted((Path(record.run) / "checkpoints").glob("step_*"))
    if checkpoints:
        lines.append(f"  newest checkpoint: {checkpoints[-1]}")
    return lines


def read_logs(record: Record, *, follow: bool) -> Iterator[str]:
    """What the ranks said, oldest file first; with `follow` until the launch has ended."""
    printed: dict[Path, int] = {}
    while True:
        active = follow and is_active(record)  # asked first: what comes before the end is printed
        files = sorted(
            (Path(record.folder) / "logs").glob("*"), key=lambda file: file.stat().st_mtime
        )
        for file in files:
            with file.open("rb") as log:
                log.seek(printed.get(file, 0))
                text = log.read()
            if text and file not in printed:
                yield f"==> {file}\n"
            yield text.decode(errors="replace")
            printed[file] = printed.get(file, 0) + len(text)
        if not active:
            return
        time.sleep(POLL_SECONDS)


def cancel(record: Record) -> None:
    """End a launch: waiting jobs at once; a run on this machine saves its step first."""
    if record.process is None:
        slurm.cancel_jobs(record.jobs)
    elif _is_alive(record):
        os.kill(record.process, signal.SIGTERM)


def _is_alive(record: Record) -> bool:
    if record.host != socket.gethostname():
        raise ConfigError(
            f"{record.name} was launched on {record.host}, not on this machine; ask there"
        )
    try:
        stat = Path(f"/proc/{record.process}/stat").read_text()
    except OSError:
        return False
    # One that has ended may never be collected: in many containers the first process does not.
    return stat.rpartition(")")[2].split()[0] not in "ZX"
